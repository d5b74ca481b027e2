"""SGLang for bench/engines.py: one engine with one runner for its experts, and what is asked of it.

SGLang's processes are spawned, so what is changed in them is a plugin of SGLang's: `plugin` below, which an entry
point in a temporary folder names.
"""

import asyncio
import importlib.util
import json
import logging
import os
import pathlib
import re
import signal
import sys
import tempfile
import time

import engine_models
from engine_models import DECODE_PROMPT, DECODE_TOKENS, prompts_of

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "FLASHINFER_USE_CUDA_NORM": "1"}
_TOLD = "SWITCHYARD_BENCH_ENGINE"  # what the processes are told, as JSON
_PURPOSES = {
    "serve": {},
    "logits": {"disable_radix_cache": True},
    "reference": {"disable_radix_cache": True, "dtype": "float32", "disable_cuda_graph": True},
    "life": {"enable_memory_saver": True, "chunked_prefill_size": 2048},
}


ENGINE_PER_RANK = False  # one starts all ranks
ERRORS = "errors.txt"  # beside the model


def load():
    """Importing SGLang initialises CUDA, after which a fork cannot use it. So each fork imports it."""
    if importlib.util.find_spec("sglang") is None:
        raise ImportError("sglang is not installed")


class Errors(logging.Handler):
    """Keeps in a file which of Switchyard's errors a process ends with: SGLang's engine says only that it ended."""

    def __init__(self, path):
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record):
        raised = re.findall(r"^switchyard\.errors\.(.+)", record.getMessage(), re.M)
        if raised:
            with open(self.path, "a") as file:
                file.write(f"{raised[-1]}\n")


def plugin():
    """Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    told = json.loads(os.environ[_TOLD])
    # This module's logger says what a scheduler ends with. The root logger would lose the handler when SGLang sets it up.
    logging.getLogger("sglang.srt.managers.scheduler").addHandler(Errors(told["errors"]))

    def fill(model, *arguments, **named):
        engine_models.fill(model, told["seed"], told["quantised"])

    def zero_after(result, *arguments, **named):
        result.hidden_states.zero_()
        return result

    def zero_at_once(original, runner, dispatched, *arguments, **named):
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        return StandardCombineInput(hidden_states=dispatched.hidden_states.new_zeros(dispatched.hidden_states.shape))

    def in_torch(original, runner, dispatched, weights, *arguments, **named):
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        scores, ids = dispatched.topk_output[:2]
        out = plain_experts(dispatched.hidden_states, weights.w13_weight, weights.w2_weight, ids, scores)
        return StandardCombineInput(hidden_states=out)

    def native(op):
        from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

        return op.forward_cuda if type(op).forward_native is MultiPlatformOp.forward_native else op.forward_native

    HookRegistry.register(
        "sglang.srt.model_loader.weight_utils.initialize_dummy_weights", fill, HookType.REPLACE
    )
    if told["backend"] == "zeroed":
        HookRegistry.register("switchyard._sglang_runner.SwitchyardRunner.run", zero_after, HookType.AFTER)
    if told["backend"] == "none":
        HookRegistry.register("sglang.srt.layers.moe.moe_runner.MoeRunner.run", zero_at_once, HookType.AROUND)
    if told["backend"] == "plain":
        # SGLang's kernels of norms take no fp32.
        HookRegistry.register("sglang.srt.layers.utils.multi_platform.MultiPlatformOp.dispatch_forward", native, HookType.REPLACE)
        # SGLang's Triton kernel would store fp32 as fp16.
        HookRegistry.register("sglang.srt.layers.moe.moe_runner.MoeRunner.run", in_torch, HookType.AROUND)


def plain_experts(x, w13, w2, ids, scores):
    """Experts with SiLU and a gate, one after another, in the type of x."""
    import torch

    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ w13[expert].T).chunk(2, dim=1)
        y = torch.nn.functional.silu(gate) * up @ w2[expert].T
        out.index_add_(0, rows, y * scores[rows, place, None].to(x.dtype))
    return out


def entry_points():
    """A folder in which SGLang finds this plugin, and Switchyard's."""
    folder = pathlib.Path(tempfile.mkdtemp())
    for name, what in (("switchyard", "switchyard.sglang:register"), ("engine_sglang", "engine_sglang:plugin")):
        info = folder / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {what}\n")
    return str(folder)


class Engine:
    """An engine of SGLang with one runner for its experts."""

    def __init__(self, path, backend, purpose, *, seed=1, quantised=None, more={}, ranks=1, reserved_sms=0):
        self.ranks = ranks
        folder = entry_points()
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        plain = purpose == "reference"
        os.environ[_TOLD] = json.dumps({"seed": seed, "quantised": quantised, "backend": "plain" if plain else backend,
                                        "errors": str(path.parent / ERRORS)})
        import sglang

        self.version = sglang.__version__
        self.vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
        runner = {"zeroed": "switchyard", "switchyard_local": "switchyard", "none": "triton"}.get(backend, backend)
        given = {
            "model_path": str(path), "load_format": "dummy", "skip_tokenizer_init": True, "log_level": "error",
            "moe_runner_backend": runner, "attention_backend": "triton", "sampling_backend": "pytorch",
            "grammar_backend": "none", "random_seed": 0, "context_length": 16384, "max_running_requests": 128,
            "chunked_prefill_size": 8192, "mem_fraction_static": 0.8, "skip_server_warmup": True,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 128],
            "cuda_graph_bs_prefill": [128, 512, 1024, 2048, 4096, 8192],
        }
        if ranks > 1:
            given |= {"tp_size": ranks, "ep_size": ranks, "dp_size": ranks, "enable_dp_attention": True,
                      "enable_dp_lm_head": True}  # each rank has all of the vocabulary, and logits of its tokens
            for name in ("chunked_prefill_size", "max_running_requests"):
                given[name] *= ranks  # SGLang divides them by the ranks
            if runner == "switchyard":
                options = {"reserved_sms": reserved_sms}
                if backend != "switchyard_local":
                    options["expert_parallel"] = "fused"
                os.environ["SWITCHYARD_SGLANG_OPTIONS"] = json.dumps(options)
                os.environ["NCCL_MAX_CTAS"] = str(reserved_sms)
        start = time.monotonic()
        self.engine = sglang.Engine(**given | _PURPOSES[purpose] | more)
        self.start_s = time.monotonic() - start

    @staticmethod
    def greedy(tokens):
        return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}

    def generate(self, prompts, tokens, **named):
        """Outputs of SGLang, greedy, in the order of the prompts."""
        return self.engine.generate(input_ids=prompts, sampling_params=self.greedy(tokens), **named)

    def tokens_and_gaps(self, prompts, tokens):
        """Of each prompt: the tokens, and how far apart the two best logprobs were."""
        found = []
        for output in self.generate(prompts, tokens, return_logprob=True, top_logprobs_num=2):
            pairs = [sorted((entry[0] for entry in at), reverse=True)[:2]
                     for at in output["meta_info"]["output_top_logprobs"]]
            found.append((output["output_ids"], [a - b for a, b in pairs]))
        return found

    def first_logits(self, prompts):
        """[prompts, vocabulary] of numpy, with a mean of zero: SGLang gives logprobs."""
        import numpy

        rows = numpy.zeros((len(prompts), self.vocabulary), numpy.float32)
        for row, prompt in zip(rows, prompts):
            output = self.generate([prompt], 1, return_logprob=True, top_logprobs_num=self.vocabulary)[0]
            for logprob, token, *_ in output["meta_info"]["output_top_logprobs"][0]:
                row[token] = logprob
            row -= row.mean()
        return rows

    def tpot(self, batch, seed):
        """ms a token: what more tokens take of the same number of requests, of each rank."""
        times = []
        for tokens in (1, DECODE_TOKENS + 1):
            prompts = prompts_of(self.vocabulary, batch * self.ranks, DECODE_PROMPT, 1000 * seed + tokens)
            start = time.monotonic()
            self.generate(prompts, tokens)
            times.append(time.monotonic() - start)
        return (times[1] - times[0]) / DECODE_TOKENS * 1e3

    def ttft(self, length, seed):
        """ms until all ranks have the first token of a prompt each."""
        prompts = prompts_of(self.vocabulary, self.ranks, length, seed)
        start = time.monotonic()
        self.generate(prompts, 1)
        return (time.monotonic() - start) * 1e3

    def rate(self, under_way, total, prompt, tokens, seed):
        """Requests per second, a new one for each that ends: `total` of each rank, `under_way` at a time."""
        async def all_of_them():
            free = asyncio.Semaphore(under_way * self.ranks)

            async def one(ids):
                async with free:
                    await self.engine.async_generate(input_ids=ids, sampling_params=self.greedy(tokens))

            start = time.monotonic()
            await asyncio.gather(*map(one, prompts_of(self.vocabulary, total * self.ranks, prompt, seed)))
            return total * self.ranks / (time.monotonic() - start)

        return self.engine.loop.run_until_complete(all_of_them())

    def made(self):
        return {}  # in SGLang's log

    def live(self, see):
        """What happens to an engine; see(what, seed) after each, with the weights that it must have."""
        see("started", 1)
        see("prompts again, from the prefix cache", 1)
        self.engine.release_memory_occupation(tags=["kv_cache"])
        self.engine.resume_memory_occupation(tags=["kv_cache"])
        self.engine.flush_cache()
        see("cache given up and taken back", 1)

    def fail(self, how):
        """Kills or stops the last rank's process."""
        import psutil

        def is_scheduler(process):
            return "scheduler" in f"{process.name()} {' '.join(process.cmdline())}"

        ranks = sorted(filter(is_scheduler, psutil.Process().children(recursive=True)), key=lambda process: process.pid)
        ranks[-1].send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    def close(self):
        self.engine.shutdown()
