"""Scripts whose ranks are processes: with a GPU each and NCCL, or on the processor with Gloo."""

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


def gpus_with_nccl(ranks):
    """The machine of ranks on GPUs, as rows tell it."""
    properties = torch.cuda.get_device_properties(0)
    return (f"{ranks} x {properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}, "
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
