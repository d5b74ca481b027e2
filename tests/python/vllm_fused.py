"""Expert parallelism in vLLM with Switchyard's own exchange, on processes over gloo: vLLM's parallel state, its
factory of layers, its loaders and its MoERunner, on the CPU engine.

    vllm_fused.py CASE... [--dp 2] [--tp 1] [--steps N] [--zeroed]

Cases are the functions of CASES. --zeroed sets the outputs of Switchyard's experts to zero: every case must fail.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

import switchyard
import switchyard.vllm
from reference import error, experts, fp8_experts, fp8_values
from vllm_ranks import E, H, I, arguments_of, compressed_config, deepseek_v4_config, factory
from vllm_ranks import in_int4, in_mxfp4, load_experts, on_cpus

K, MOST = 2, 40  # most tokens of a rank's step
DEADLINE = 3.0
BF16_ERROR = 1e-2


class Wrong(AssertionError):
    """Outputs that are not the layer's."""


class Rank:
    """This process as one of vLLM's ranks, and what makes layers."""

    def __init__(self, rank, args, rendezvous):
        on_cpus()
        os.environ["VLLM_MOE_SKIP_PADDING"] = "1"  # the default from 0.33 on
        switchyard.vllm.register()
        self.rank, self.dp, self.tp, self.steps = rank, args.dp, args.tp, args.steps
        self.ranks, self.dp_rank = args.dp * args.tp, rank // args.tp
        self.agrees = False  # whether ranks tell each other by vLLM how many tokens they have
        torch.set_num_threads(1)  # ranks share the processors
        os.environ["RANK"] = str(rank)  # external launchers say so
        config = self.config()
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        with set_current_vllm_config(config):
            init_distributed_environment(self.ranks, rank, rendezvous, rank, "gloo")
            initialize_model_parallel(tensor_model_parallel_size=self.tp)
        if args.zeroed:
            zero()

    def config(self, change=None, **options):
        from vllm.config import DeviceConfig, ParallelConfig, SchedulerConfig, VllmConfig

        fused = {"expert_parallel": "fused", "num_threads": 1, "deadline": 20}
        scheduler = SchedulerConfig.default_factory(max_num_batched_tokens=MOST, max_num_seqs=MOST)
        config = VllmConfig(
            additional_config={"switchyard": fused | options},
            device_config=DeviceConfig("cpu"),
            scheduler_config=scheduler,
            parallel_config=ParallelConfig(
                tensor_parallel_size=self.tp, data_parallel_size=self.dp,
                enable_expert_parallel=True, distributed_executor_backend="external_launcher",
            ),
        )
        if change:
            change(config)
        return config

    def layer(self, config=None, **arguments):
        """A runner of vLLM, and the configuration it was made with."""
        from vllm.config import set_current_vllm_config

        config = config or self.config()
        given = arguments_of("experts", custom_routing_function=chosen)
        with set_current_vllm_config(config):
            runner = factory()(**given | arguments)
        self.is_fused(runner, config)
        rows = runner.routed_experts.rows
        if rows is not None:
            self._promised = []
            most = rows._most
            rows._most = lambda x: self._promised.append(most(x)) or self._promised[-1]
        return runner, config

    def is_fused(self, runner, config):
        layer = runner.routed_experts
        fused = config.additional_config["switchyard"]["expert_parallel"] == "fused"
        assert (layer.rows is not None) == fused
        assert not fused or layer.binding.ranks.world.size == self.ranks

    def step(self, layer, counts, of=None):
        """One step of all ranks, where data-parallel rank r has counts[r] tokens; None is a dummy run of one
        row. What the runner returned, and its rows."""
        from vllm.forward_context import set_forward_context

        runner, config = layer
        count = counts[self.dp_rank]
        tokens = 1 if count is None else count
        if runner.moe_config.is_sequence_parallel:
            # A model gives each rank its part, which it pads.
            tokens = -(-tokens // self.tp)
            torch.manual_seed(torch.randint(1 << 30, ()).item() + self.rank)
        across = torch.tensor([1 if count is None else count for count in counts], dtype=torch.int32)
        x, logits = of(tokens) if of else (torch.randn(tokens, H).bfloat16(), torch.randn(tokens, E))
        padding = torch.full((tokens,), count is None)
        chosen.idle = count is None
        given = {"num_tokens": 1 if count is None else count, "is_padding": padding}
        if self.dp > 1 and not self.agrees:
            given["num_tokens_across_dp"] = across
        with torch.inference_mode(), set_forward_context(None, config, **given):
            out = runner(x, logits)
        if runner.routed_experts.rows is not None:
            self._same_promise(across, runner)
        return out, x, logits

    def _same_promise(self, across, runner):
        """All ranks promised the same number of rows of this step, the greatest, if few have so many."""
        over = runner.routed_experts.rows.over
        most = -(-int(across.max()) // over)
        known = self.dp * over == self.ranks and most <= 512
        assert self._promised == [most if known else 0], (across, over, self._promised)
        self._promised.clear()


def give_cpus_ragged_collectives():
    """What vLLM's own exchange of tokens needs, and its communicator for CPUs lacks."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(self, tensors, dim=0, sizes=None):
        def gathered(tensor):
            whole = [torch.empty(max(sizes), *tensor.shape[1:], dtype=tensor.dtype) for _ in sizes]
            mine = torch.zeros_like(whole[0])
            mine[: tensor.shape[0]] = tensor
            dist.all_gather(whole, mine, group=self.cpu_group)
            return torch.cat([rows[:size] for rows, size in zip(whole, sizes)])

        return [gathered(tensor) for tensor in tensors] if isinstance(tensors, list) else gathered(tensors)

    def reduce_scatterv(self, tensor, dim=0, sizes=None):
        total = tensor.clone()
        dist.all_reduce(total, group=self.cpu_group)
        return total.split(sizes)[self.rank_in_group]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def chosen(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.softmax(-1).topk(topk)
    if chosen.idle:
        # As vLLM's routers do with rows of padding; vLLM's own are CUDA kernels.
        return torch.zeros_like(weights), torch.full_like(ids, -1).int()
    if chosen.placement is not None:
        # A replica by the token's number, as vLLM's router does it.
        for t, row in enumerate(ids):
            for k, expert in enumerate(row.tolist()):
                places = (chosen.placement == expert).nonzero().flatten()
                row[k] = places[t % len(places)]
    return chosen.scale * weights / weights.sum(-1, keepdim=True), ids.int()


chosen.idle, chosen.placement, chosen.scale = False, None, 1.0


def zero():
    from switchyard._vllm import SwitchyardExperts

    original = SwitchyardExperts.apply

    def apply(self, output, *arguments, **named):
        original(self, output, *arguments, **named)
        output.zero_()

    SwitchyardExperts.apply = apply


def routed(logits):
    weights, ids = logits.softmax(-1).topk(K)
    return torch.full_like(ids, -1) if chosen.idle else ids, weights / weights.sum(-1, keepdim=True)


def counts_of(step, dp):
    """Tokens of each data-parallel rank: different ones, one, most of all, none, and dummy runs."""
    cycle = (
        [1, None], [3, 17], [None, MOST], [MOST, 1], [None, None], [0, 5], [7, 7], [11, 0], [2, None], [0, 0],
    )[step % 10]
    return [cycle[(rank + step // 10) % 2] for rank in range(dp)]


def own_matrices(*shape):
    """Seeded, of scale 1 / sqrt(K), the same on all ranks."""
    return (torch.randn(*shape) / shape[-1] ** 0.5).bfloat16()


def bf16():
    gate, up, down = own_matrices(E, I, H), own_matrices(E, I, H), own_matrices(E, H, I)
    return {"weight": (gate, up, down)}, (gate, up, down)


def fp8():
    """Codes and scales of blocks, and the numbers."""
    found = [fp8_values(shape) for shape in ((E, I, H), (E, I, H), (E, H, I))]
    stored = {
        "weight": [codes for codes, _, _ in found],
        "weight_scale_inv": [scale for _, scale, _ in found],
    }
    return stored, [exact for _, _, exact in found]


def fp8_config():
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])


def loaded(rank, layer, stored):
    load_experts(layer[0].routed_experts, stored)
    layer[0].routed_experts.quant_method.process_weights_after_loading(layer[0].routed_experts)


def put_biases(layer, biases):
    held = layer[0].routed_experts
    own = held.binding.ranks.world.own_experts(E)
    held.w13_bias.data.copy_(torch.cat(biases[:2], 1)[own.start : own.stop])
    held.w2_bias.data.copy_(biases[2][own.start : own.stop])


def compare(rank, layers, exact, bound, biases=(None, None, None), reference=experts):
    """Steps of all kinds of counts against the plain layer, and of vLLM's own exchange where it can have them.

    It fails after the last step: the other ranks would wait."""
    wrong = []
    for step in range(rank.steps):
        counts = counts_of(step, rank.dp)
        # Ranks of tensor parallelism have the same rows, or parts of them.
        torch.manual_seed(1000 + 10 * step + rank.dp_rank)
        out, x, logits = rank.step(layers[0], counts)
        assert out.shape == x.shape and out.dtype == x.dtype
        wanted = reference(x, *exact, *routed(logits), switchyard.Activation(), biases)
        if not wanted.any():
            # No row, or none that asks for an expert.
            assert not out.any()
        else:
            found = error(out, wanted)
            limit = bound(x, logits, wanted) if callable(bound) else bound
            if not found < limit:
                wrong.append(f"step {step}: an error of {found} is not below {limit}")
        if len(layers) > 1 and 0 not in counts and step < 20:
            # vLLM gathers the tokens and adds the ranks' sums, in bf16.
            theirs, _, _ = rank.step(layers[1], counts, of=lambda tokens: (x, logits))
            if counts[rank.dp_rank] is not None and not error(out, theirs.double()) < 2 * BF16_ERROR:
                wrong.append(f"step {step}: vLLM's exchange gives other numbers")
    if wrong:
        raise Wrong("\n".join(wrong))


def case_bf16(rank):
    give_cpus_ragged_collectives()
    stored, exact = bf16()
    layers = rank.layer(), rank.layer(rank.config(expert_parallel="local"), prefix="local")
    for layer in layers:
        loaded(rank, layer, stored)
    compare(rank, layers, exact, BF16_ERROR)


def case_bias(rank):
    layer = rank.layer(has_bias=True)
    stored, exact = bf16()
    biases = [own_matrices(E, I), own_matrices(E, I), own_matrices(E, H)]
    put_biases(layer, biases)
    loaded(rank, layer, stored)
    compare(rank, [layer], exact, BF16_ERROR, biases)


def case_fp8(rank):
    layer = rank.layer(quant_config=fp8_config())
    stored, exact = fp8()
    loaded(rank, layer, stored)
    compare(
        rank, [layer], exact,
        # Twice what the rounding of activations to e4m3, simulated, costs.
        lambda x, logits, wanted: 2 * error(fp8_experts(x, *exact, *routed(logits)), wanted),
    )


def case_mxfp4(rank):
    layer = rank.layer(quant_config=deepseek_v4_config())
    stored, exact = in_mxfp4()
    loaded(rank, layer, stored)
    compare(rank, [layer], exact, BF16_ERROR)


def case_int4(rank):
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe as module,
    )

    # 0.26 asks for a GPU before it chooses the class that lets choose a kernel.
    module.check_moe_marlin_supports_layer = lambda *given, **named: True
    layer = rank.layer(quant_config=compressed_config())
    stored, exact = in_int4()
    loaded(rank, layer, stored)
    compare(rank, [layer], exact, BF16_ERROR)


def case_split(rank):
    """A model that splits its tokens over the ranks of tensor parallelism."""
    layer = rank.layer(is_sequence_parallel=True)
    assert layer[0].routed_experts.rows.over == 1
    stored, exact = bf16()
    loaded(rank, layer, stored)
    compare(rank, [layer], exact, BF16_ERROR)


def case_input(rank):
    """Routing weights that multiply the experts' input, as of Llama-4."""
    layer = rank.layer(top_k=1, apply_router_weight_on_input=True)
    stored, exact = bf16()
    loaded(rank, layer, stored)

    def reference(x, gate, up, down, ids, weights, activation, biases):
        # chosen() makes a single weight of 1, so half of it comes out as half of the input.
        return experts(x / 2, gate, up, down, ids[:, :1], torch.ones(x.shape[0], 1), activation)

    chosen.scale = 0.5
    compare(rank, [layer], exact, BF16_ERROR, reference=reference)


def case_shared(rank):
    """A shared expert beside them, of which each rank of tensor parallelism has a part: vLLM adds the parts up, and
    must leave the experts' sums alone."""

    class Shared(torch.nn.Module):
        def forward(self, x):
            return x / rank.tp

    layer = rank.layer(shared_experts=Shared())
    stored, exact = bf16()
    loaded(rank, layer, stored)

    def reference(x, *arguments):
        return experts(x, *arguments) + x.double()

    compare(rank, [layer], exact, BF16_ERROR, reference=reference)


def case_eplb(rank):
    _, (gate, up, down) = bf16()
    balance(rank, (gate, up, down), {"w13_weight": torch.cat([gate, up], 1), "w2_weight": down})


def case_eplb_bias(rank):
    _, (gate, up, down) = bf16()
    biases = [own_matrices(E, I), own_matrices(E, I), own_matrices(E, H)]
    whole = {"w13_weight": torch.cat([gate, up], 1), "w2_weight": down}
    whole |= {"w13_bias": torch.cat(biases[:2], 1), "w2_bias": biases[2]}
    balance(rank, (gate, up, down), whole, biases=biases, has_bias=True)


def case_eplb_fp8(rank):
    stored, exact = fp8()
    whole = {
        f"{name}_{suffix}": torch.cat(parts[:2], 1) if name == "w13" else parts[2]
        for suffix, parts in stored.items() for name in ("w13", "w2")
    }
    bound = lambda x, logits, wanted: 2 * error(fp8_experts(x, *exact, *routed(logits)), wanted)
    balance(rank, exact, whole, bound, quant_config=fp8_config())


def balance(rank, exact, whole, bound=BF16_ERROR, biases=(None, None, None), **more):
    """Physical experts with replicas, which vLLM moves in place between steps.

    whole: every parameter of the layer, of all logical experts.
    """
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    class OnCpus(TorchDistNcclEplbCommunicator):
        def execute(self):
            for request in dist.batch_isend_irecv(self._p2p_ops) if self._p2p_ops else ():
                request.wait()
            self._p2p_ops.clear()

    def balanced(config):
        config.parallel_config.enable_eplb = True
        config.parallel_config.eplb_config.num_redundant_experts = 2

    layer = rank.layer(rank.config(balanced), enable_eplb=True, num_redundant_experts=2, **more)
    runner, places = layer[0], E + 2
    state = runner.eplb_state
    state.should_record_tensor = torch.zeros((), dtype=torch.bool)
    state.num_unpadded_tokens_tensors = [torch.zeros((), dtype=torch.int32)]
    runner.set_eplb_state(0, *(torch.zeros(1, size, dtype=torch.int32) for size in (places, E, E)))
    held = runner.routed_experts
    own = held.binding.ranks.world.own_experts(places)
    placement = torch.cat([torch.arange(E), torch.tensor([0, 1])])
    for name, tensor in whole.items():
        getattr(held, name).data.copy_(tensor[placement[own.start : own.stop]])
    loaded(rank, layer, {})
    assert set(dict(held.named_parameters())) == set(whole)
    addresses = {name: getattr(held, name).data_ptr() for name in whole}
    # Bytes: gloo knows few types.
    group, weights = get_ep_group(), [weight.view(torch.uint8) for weight in runner.get_expert_weights()]
    for number in range(4):
        chosen.placement = placement
        compare(rank, [layer], exact, bound, biases)
        torch.manual_seed(number)
        # Every expert has a place, and others than before have two.
        moved = torch.cat([torch.randperm(E), torch.randint(E, (2,))])[torch.randperm(places)]
        rearrange_expert_weights_inplace(
            placement[None], moved[None], [weights], [torch.empty_like(weight) for weight in weights],
            group.cpu_group, OnCpus(group.cpu_group),
        )
        assert not torch.equal(placement, moved)
        placement = moved
    assert addresses == {name: getattr(held, name).data_ptr() for name in whole}


def case_soak(rank):
    """Two layers, of which one has biases, in every step, with all kinds of counts."""
    layers = rank.layer(), rank.layer(has_bias=True)
    stored, exact = bf16()
    biases = [own_matrices(E, I), own_matrices(E, I), own_matrices(E, H)]
    put_biases(layers[1], biases)
    for layer in layers:
        loaded(rank, layer, stored)
    exact, biases = ([matrix.double() for matrix in matrices] for matrices in (exact, biases))
    start = time.monotonic()
    for step in range(rank.steps):
        torch.manual_seed(step * rank.dp + rank.dp_rank)
        counts = counts_of(step, rank.dp) if step % 3 else torch.randint(
            MOST + 1, (rank.dp,), generator=torch.Generator().manual_seed(step)
        ).tolist()
        for layer, of in zip(layers, ((None, None, None), biases)):
            out, x, logits = rank.step(layer, counts)
            # A part of the rows is enough: others of the same pass are as right or wrong.
            rows = slice(0, 3)
            if counts[rank.dp_rank] is None:
                assert (out == 0).all(), step
            elif counts[rank.dp_rank]:
                wanted = experts(x[rows], *exact, *routed(logits[rows]), switchyard.Activation(), of)
                assert error(out[rows], wanted) < BF16_ERROR, step
                assert out.isfinite().all(), step
    if rank.rank == 0:
        print(f"{rank.steps} steps in {time.monotonic() - start:.0f} s", flush=True)


def case_stop(rank):
    fail(rank, signal.SIGSTOP)


def case_halt(rank):
    """Here the others wait in vLLM's agreement on the step, and not in a layer."""
    from switchyard import _vllm_ranks

    rank.agrees = True
    _vllm_ranks.before_serving(lambda: None)()
    fail(rank, signal.SIGSTOP)


def case_kill(rank):
    fail(rank, signal.SIGKILL)


def fail(rank, how):
    """The last rank fails between two steps, and says so. The others say who failed, and end with the error."""
    layer = rank.layer(rank.config(deadline=DEADLINE))
    loaded(rank, layer, bf16()[0])
    for step in range(10):
        if step == 5 and rank.rank == rank.ranks - 1:
            print("fails", flush=True)
            os.kill(os.getpid(), how)
        start = time.monotonic()
        try:
            rank.step(layer, [3] * rank.dp)
        except switchyard.errors._WaitFailed as failure:
            print(f"step {step} named {failure.peer} in {time.monotonic() - start:.3f} s", flush=True)
            raise


def case_refusals(rank):
    def refused(text, change=None, options={}, **arguments):
        try:
            rank.layer(rank.config(change, **options), prefix=text, **arguments)
        except switchyard.Unsupported as refusal:
            assert text in str(refusal), refusal
        else:
            raise AssertionError(f"not refused: {text}")

    def set_parallel(**values):
        def change(config):
            for name, value in values.items():
                setattr(config.parallel_config, name, value)

        return change

    refused("two-batch overlap", set_parallel(enable_dbo=True))
    refused("elastic expert parallelism", set_parallel(enable_elastic_ep=True))
    refused("LoRA", lambda config: setattr(config, "lora_config", object()))
    refused("--all2all-backend is 'deepep_low_latency'", set_parallel(all2all_backend="deepep_low_latency"))
    refused("--enable-expert-parallel", set_parallel(enable_expert_parallel=False))
    refused("pipeline parallelism over 2 ranks", set_parallel(pipeline_parallel_size=2))
    refused("weights are transferred", lambda config: setattr(config, "weight_transfer_config", object()))
    if rank.dp == 1:
        # With data parallelism vLLM itself has linear placement only.
        refused(
            "neighbouring experts", set_parallel(expert_placement_strategy="round_robin"), use_grouped_topk=True,
            num_expert_group=2, topk_group=1, custom_routing_function=None,
        )
        refused("skip_final_all_reduce", reduce_results=False)
    refused(
        "--enable-eplb moves experts", set_parallel(enable_eplb=True), enable_eplb=True,
        quant_config=deepseek_v4_config(),
    )
    layer = rank.layer()
    loaded(rank, layer, bf16()[0])
    try:
        rank.step(layer, [rank.tp * MOST + 1] * rank.dp)
        raise AssertionError("more tokens than a layer has room for")
    except switchyard.CapacityExceeded as refusal:
        assert "more than max_tokens" in str(refusal)


CASES = {name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")}


def rank_body(number, args, rendezvous):
    rank = Rank(number, args, rendezvous)
    for case in args.cases:
        torch.manual_seed(0)
        chosen.idle, chosen.placement, chosen.scale = False, None, 1.0
        try:
            CASES[case](rank)
        except Wrong:
            if not args.zeroed:
                raise
        else:
            assert not args.zeroed, f"{case} did not notice that outputs are zero"
        dist.barrier()
    os._exit(0)  # as bench/rank_processes.py ends ranks, and why


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", choices=CASES, nargs="+")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--zeroed", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        given = args, f"file://{pathlib.Path(directory) / 'rendezvous'}"
        if args.cases in (["kill"], ["stop"], ["halt"]):
            failing(given, args.dp * args.tp)
        else:
            torch.multiprocessing.spawn(rank_body, given, nprocs=args.dp * args.tp)
            print("agrees")


def failing(given, ranks):
    """All ranks but the last end by themselves."""
    context = torch.multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank_body, args=(number, *given)) for number in range(ranks)]
    for process in processes:
        process.start()
    for process in processes[:-1]:
        process.join()
    processes[-1].kill()
    print("ended with", [process.exitcode for process in processes[:-1]])


if __name__ == "__main__":
    main()
