"""Scripts whose ranks are processes: with a GPU each and NCCL, or on the processor with Gloo."""

import os
import sys
import tempfile
from typing import NoReturn

import torch


def add_options(parser):
    parser.add_argument("--ranks", type=int, help="processes (default: one per GPU; 2 with --cpu)")
    parser.add_argument("--cpu", action="store_true", help="ranks on the processor, with Gloo")


def choose_ranks(args, parser):
    """Fills args.ranks, and refuses more ranks than there are GPUs."""
    gpus = 0 if args.cpu else torch.cuda.device_count()
    args.ranks = args.ranks or (2 if args.cpu else gpus)
    if not args.cpu and gpus < max(args.ranks, 2):
        parser.error(f"{args.ranks} ranks need a GPU each, 2 or more, and there are {gpus}; use --cpu, or fewer --ranks")


def spawn(run_rank, args):
    """Runs run_rank(rank, args, rendezvous) in args.ranks processes. Returns the first exit code that is not 0, or 0."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            torch.multiprocessing.spawn(run_rank, (args, f"{directory}/rendezvous"), nprocs=args.ranks)
        except torch.multiprocessing.ProcessExitedException as ended:
            return ended.exit_code
    return 0


def end(wrong) -> NoReturn:
    """Ends the process group and this process: with exit code 1 where it found something wrong.

    Gloo's threads free tensors after those who wait for an operation have gone on, and take Python's lock for it. An
    interpreter that ends meanwhile ends them, which aborts the process (pytorch/pytorch#190489). Groups that meshes
    refer to outlive destroy_process_group(), and so do their threads. So the interpreter is not ended."""
    torch.distributed.destroy_process_group()
    leave(int(bool(wrong)))


def leave(code) -> NoReturn:
    """Ends this process without waiting for collectives that others will not join."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def require_no_multicast(script):
    """Ends the program if a library may use NVLink multicast, which can put the host's GPUs out of service."""
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"), ("NVSHMEM_DISABLE_NVLS", "1")):
        if os.environ.get(name) != value:
            sys.exit(f"{script}: {name} must be {value}")


def gpus(ranks):
    """The machine of ranks on GPUs, as rows tell it."""
    properties = torch.cuda.get_device_properties(0)
    return f"{ranks} x {properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}"


def gpus_with_nccl(ranks):
    return f"{gpus(ranks)}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
