"""vLLM's experts, run by Switchyard: a plugin that vLLM finds by its entry point.

``vllm serve MODEL --additional-config '{"switchyard": {}}'`` selects it. Nothing of vLLM is imported
before vLLM calls `register`. See docs/frameworks/vllm.md.
"""

from __future__ import annotations

from ._serving import Options
from ._vllm_setup import activation_of, capacity, log, options_of, refuse


def register() -> None:
    """Called by vLLM in each of its processes, perhaps more than once.

    Without ``--additional-config '{"switchyard": {}}'`` vLLM stays as it is. With a vLLM whose
    interface is not one that the plugin knows, it says so and leaves vLLM as it was.
    """
    try:
        from . import _vllm
    except (ImportError, AttributeError) as error:
        problem: str | None = f"vLLM lacks what the plugin is built on: {error}"
    else:
        problem = _vllm.missing()
    if problem:
        log.warning(
            "Switchyard does not know the interface of this vLLM, and leaves it as it is, also where "
            "--additional-config asks for Switchyard: %s. The plugin is written for vLLM 0.26 to 0.33",
            problem,
        )
    elif problem := _vllm.install():
        log.warning("Switchyard leaves vLLM as it is: %s", problem)


__all__ = ["Options", "activation_of", "capacity", "options_of", "refuse", "register"]
