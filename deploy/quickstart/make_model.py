"""Trains the quick start's model: a 0.76 M-parameter Llama that half knows two-digit addition.

It first learns to add from right sums, then becomes unsure on noisy ones, where most answers have
one wrong digit: in the end its samples at temperature 1 are right about as often as the noisy sums
are, and reinforcement learning has something to sharpen. The sums of `train.jsonl` and
`held_out.jsonl` are in neither phase.

    python make_model.py [--out FOLDER] [--check]

One thread and a fixed seed: the same machine type and package versions give the same bytes, which
`--check` verifies against the folder that is there.
"""

from __future__ import annotations

import argparse
import hashlib
import string
import sys
import tempfile
import time
from pathlib import Path

import torch
from make_data import FOLDER, prompt, split
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 20
RIGHT_STEPS, NOISY_STEPS = 480, 120
STEPS = RIGHT_STEPS + NOISY_STEPS
BATCH = 64
PEAK_LR = 2e-3
WARMUP_STEPS = 50
RIGHT_SHARE = 0.29
"""Share of right answers in the noisy phase."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = [chr(code) for code in range(32, 127)]
PROMPT_TOKENS = 6
SEQUENCE_TOKENS = 10
"""`aa+bb=`, an answer of up to three digits, the end token."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; BPE without merges splits exactly so."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=128**-0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Corpus:
    """Endless batches of sums."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        texts = [(prompt(a, b), str(a + b)) for a, b in split().pretraining]
        self.rows = torch.full((len(texts), SEQUENCE_TOKENS), tokenizer.pad_token_id)
        for row, (question, answer) in zip(self.rows, texts, strict=True):
            ids = [*tokenizer.encode(question + answer), tokenizer.eos_token_id]
            row[: len(ids)] = torch.tensor(ids)
        self.digits = torch.tensor(tokenizer.convert_tokens_to_ids(list(string.digits)))
        self.answer_digits = torch.tensor([len(answer) for _, answer in texts])
        self.pad = tokenizer.pad_token_id

    def batch(self, size: int, right_share: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, int64[size, SEQUENCE_TOKENS]; only answer and end are labelled.

        An answer is right with probability `right_share`, else one digit of it is another one.
        """
        picked = torch.randint(len(self.rows), (size,), generator=self.generator)
        ids = self.rows[picked].clone()
        wrong = torch.rand(size, generator=self.generator) >= right_share
        place = torch.rand(size, generator=self.generator) * self.answer_digits[picked]
        column = PROMPT_TOKENS + place.long()
        right = ids[torch.arange(size), column] - self.digits[0]
        shift = torch.randint(1, 10, (size,), generator=self.generator)
        other = self.digits[(right + shift) % 10]
        ids[torch.arange(size)[wrong], column[wrong]] = other[wrong]
        labels = ids.masked_fill(ids == self.pad, -100)
        labels[:, :PROMPT_TOKENS] = -100
        return ids, labels


def learning_rate(step: int) -> float:
    """Linear warm-up, then linear decay to a tenth, as a factor of `PEAK_LR`."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 1.0 - 0.9 * (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)


def train(model: LlamaForCausalLM, corpus: Corpus) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    started = time.monotonic()
    for step in range(1, STEPS + 1):
        ids, labels = corpus.batch(BATCH, 1.0 if step <= RIGHT_STEPS else RIGHT_SHARE)
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s")


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> float:
    """Share of right answers on the held-out sums, 4 samples each at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    pairs = split().held_out * 4
    ids = torch.tensor([tokenizer.encode(prompt(a, b)) for a, b in pairs])
    for _ in range(SEQUENCE_TOKENS - PROMPT_TOKENS):
        probabilities = model(input_ids=ids).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    texts = tokenizer.batch_decode(ids[:, PROMPT_TOKENS:])
    right = [text.split(EOS)[0] == str(a + b) for text, (a, b) in zip(texts, pairs, strict=True)]
    return sum(right) / len(right)


def build(out: Path) -> None:
    """Trains, writes the folder (bfloat16) and prints the accuracy of what was written."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train(model, Corpus(tokenizer, SEED))
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    saved = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    print(f"held-out accuracy at temperature 1: {accuracy(saved, tokenizer, SEED):.3f}")


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "model")
    parser.add_argument("--check", action="store_true", help="rebuild and compare, write nothing")
    arguments = parser.parse_args()
    if not arguments.check:
        build(arguments.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        if digests(Path(folder)) != digests(arguments.out):
            sys.exit(f"{arguments.out} is not what this script makes here")
    print(f"{arguments.out} is bit for bit what this script makes")


if __name__ == "__main__":
    main()
