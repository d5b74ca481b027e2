"""vLLM for bench/engines.py: one engine with one kernel for its experts, and what is asked of it."""

import functools
import gc
import multiprocessing
import os
import signal
import statistics
import time

import engine_models
from engine_models import DECODE_PROMPT, DECODE_TOKENS, prompts_of

# Set before vLLM is imported. With fork an engine's process needs not import everything anew.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_LOGGING_LEVEL": "WARNING",
}


ENGINE_PER_RANK = True


def load():
    """Imports what the forks share."""
    import vllm  # noqa: F401
    from vllm.v1.engine import core, llm_engine  # noqa: F401


# Further arguments of an engine, by its purpose.
_LOGITS = {"enable_prefix_caching": False}
_PURPOSES = {
    "serve": {},
    "logits": _LOGITS,
    "reference": _LOGITS | {"dtype": "float32", "enforce_eager": True, "attention_backend": "TRITON_ATTN"},
    "life": {"enable_sleep_mode": True, "max_num_batched_tokens": 2048},
}


OURS = ("switchyard", "switchyard_local", "zeroed")


class Engine:
    """An engine of vLLM with one backend for its experts."""

    def __init__(self, path, backend, purpose, *, seed=1, quantised=None, more={}, rank=None, reserved_sms=0):
        if rank is not None:
            os.environ.update(
                VLLM_DP_RANK=str(rank.number), VLLM_DP_RANK_LOCAL=str(rank.number), VLLM_DP_SIZE=str(rank.size),
                VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(rank.port),
            )
        import torch
        import vllm
        from vllm.model_executor.model_loader import register_model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if purpose == "serve" else "0"
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for apply_model()

        @register_model_loader("seeded")
        class Seeded(BaseModelLoader):
            def download_model(self, model_config):
                pass

            def load_weights(self, model, model_config):
                engine_models.fill(model, loading.seed, quantised)

            def get_all_weights(self, model_config, model):
                """For weights loaded anew: shapes and types are those of the first time."""
                config = model_config.hf_config
                width = model_config.get_head_size()
                heads = [config.num_attention_heads * width] + 2 * [config.num_key_value_heads * width]
                return engine_models.checkpoint(dict(model.named_parameters()), heads, loading.seed)

        loading = self
        self.seed = seed

        self.version, self.torch = vllm.__version__, torch
        given = {"load_format": "seeded", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_seqs": 128,
                 "max_model_len": 16384, "gpu_memory_utilization": 0.9, "disable_log_stats": False,
                 "seed": 0, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]}}
        backend, _, exchange = backend.partition("+")
        if exchange:
            given["all2all_backend"] = exchange
        options = {}
        if rank is not None:
            given["enable_expert_parallel"] = True
            if backend in OURS:
                options = {"reserved_sms": reserved_sms}
                os.environ["NCCL_MAX_CTAS"] = str(reserved_sms)
            if backend in ("switchyard", "zeroed"):
                options["expert_parallel"] = "fused"
        if backend in OURS:
            given["additional_config"] = {"switchyard": options}
        if backend == "zeroed":
            from switchyard._vllm import SwitchyardExperts

            zeroed(SwitchyardExperts)
        elif backend == "none":
            from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

            given["moe_backend"] = "triton"
            zeroed(TritonExperts, at_once=True)
        elif backend not in OURS:
            given["moe_backend"] = backend
        start = time.monotonic()
        self.llm = vllm.LLM(model=str(path), **given | _PURPOSES[purpose] | more)
        self.start_s = time.monotonic() - start
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self._watched = False  # whether the model keeps its logits

    @staticmethod
    def greedy(tokens, logprobs=None):
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, logprobs=logprobs
        )

    def generate(self, prompts, tokens, logprobs=None):
        """Outputs of vLLM, greedy, in the order of the prompts."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(given, self.greedy(tokens, logprobs), use_tqdm=False)

    def tokens_and_gaps(self, prompts, tokens):
        """Of each prompt: the tokens, and how far apart the two best logprobs were."""
        found = []
        for output in self.generate(prompts, tokens, logprobs=2):
            gaps = []
            for at in output.outputs[0].logprobs:
                first, second = sorted((entry.logprob for entry in at.values()), reverse=True)[:2]
                gaps.append(first - second)
            found.append((list(output.outputs[0].token_ids), gaps))
        return found

    def first_logits(self, prompts):
        """[prompts, vocabulary], fp32, of numpy."""

        if not self._watched:
            self._watched = True
            self.llm.apply_model(watch_logits)
        rows = []
        for prompt in prompts:
            self.generate([prompt], 1)
            rows.append(self.llm.apply_model(last_logits)[0])
        return self.torch.stack(rows).numpy()

    def tpot(self, batch, seed):
        """ms a token of each request, from its first to its last."""
        prompts = prompts_of(self.vocabulary, batch, DECODE_PROMPT, seed)
        times = []
        for output in self.generate(prompts, DECODE_TOKENS + 1):
            stats = output.metrics
            times.append((stats.last_token_ts - stats.first_token_ts) / DECODE_TOKENS * 1e3)
        return statistics.median(times)

    def ttft(self, length, seed):
        output = self.generate(prompts_of(self.vocabulary, 1, length, seed), 1)[0]
        return output.metrics.first_token_latency * 1e3

    def rate(self, under_way, total, prompt, tokens, seed):
        """Requests per second, a new one for each that ends."""
        engine, sampling = self.llm.llm_engine, self.greedy(tokens)
        waiting = prompts_of(self.vocabulary, total, prompt, seed)
        sent = done = 0
        start = time.monotonic()
        while done < total:
            while sent < total and sent - done < under_way:
                engine.add_request(f"rate-{seed}-{sent}", {"prompt_token_ids": waiting[sent]}, sampling)
                sent += 1
            done += sum(output.finished for output in engine.step())
        return total / (time.monotonic() - start)

    def made(self):
        """Seconds and MiB that Switchyard's layers took at the start."""

        layers, seconds, size = self.llm.apply_model(account)[0]
        return {"made_layers": layers, "made_s": round(seconds, 3), "made_mib": round(size / 2**20, 1)}

    def live(self, see):
        """What happens to an engine; see(what, seed) after each, with the weights that it must have."""
        llm = self.llm
        see("started", 1)
        see("prompts again, from the prefix cache", 1)
        llm.sleep(level=1)
        llm.wake_up()
        llm.reset_prefix_cache()
        see("slept and woken", 1)
        self.seed = 2
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        see("weights loaded anew", 2)
        self.seed = 1
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        see("weights given up in sleep and loaded anew", 1)
        if llm.llm_engine.model_config.quantization is None:
            # Nothing tells a layer. Scales in FP8 go through the engine's loader.
            llm.apply_model(functools.partial(engine_models.fill, seed=2))
            llm.reset_prefix_cache()
            see("weights written in place", 2)

    @staticmethod
    def fail(how):
        """Kills or stops the engine's process."""
        for process in multiprocessing.active_children():
            os.kill(process.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])

    def close(self):
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            del self.llm
            gc.collect()


# Functions for apply_model(), which another process may run.


def watch_logits(model):
    """The model keeps the last row of logits of its last pass that had any."""
    original = model.compute_logits

    def compute_logits(*arguments, **named):
        out = original(*arguments, **named)
        if out is not None and len(out):
            model._last_logits = out[-1].float().cpu()
        return out

    model.compute_logits = compute_logits


def last_logits(model):
    return model._last_logits


def account(model):
    """What Switchyard's layers of a process took."""
    from switchyard._serving import made

    return made.layers, made.seconds, made.bytes


def zeroed(cls, at_once=False):
    """Experts of this class return zeros, after their work or instead of it."""
    original = cls.apply

    def apply(self, output, *arguments, **named):
        if not at_once:
            original(self, output, *arguments, **named)
        output.zero_()

    cls.apply = apply
