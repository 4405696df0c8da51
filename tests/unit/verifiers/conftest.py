import sys
from pathlib import Path

# Child processes inherit the import path, and find `verifier_doubles` on it.
sys.path.append(str(Path(__file__).parent))
