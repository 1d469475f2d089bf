"""How long `headwise cost` takes on a 70B-size config, and `headwise --help`: whole processes, cold start included.

python benchmarks/cost_speed.py [-o results/cost_speed.json]
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import LlamaConfig

REPEATS = 5
CONFIG = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "architectures": ["LlamaForCausalLM"],
}


def seconds(*args):
    """Wall-clock time of one `headwise` process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "headwise", *args], check=True, capture_output=True)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("results/cost_speed.json"))
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**CONFIG).save_pretrained(folder)
        commands = {
            "--help": ["--help"],
            "cost of a 70B config": ["cost", folder, "--context", "32768", "--batch", "8"],
        }
        rows = {name: [round(seconds(*args), 2) for _ in range(REPEATS)] for name, args in commands.items()}
    for name, times in rows.items():
        print(f"headwise {name}: median {statistics.median(times):.2f} s, {min(times)} to {max(times)} s")
    facts = {"machine": platform.machine(), "python": platform.python_version(), "repeats": REPEATS}
    output.write_text(json.dumps({**facts, "seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
