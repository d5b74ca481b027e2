"""SGLang's experts, run by Switchyard: a plugin that SGLang finds by its entry point.

``python -m sglang.launch_server --moe-runner-backend switchyard`` selects it. Nothing of SGLang is
imported before SGLang calls `register`, which leads to `_sglang_runner`. See docs/frameworks/sglang.md.
"""

from __future__ import annotations

from ._serving import Options
from ._sglang_setup import Deployment, activation_of, capacity, log, options_of, refuse
from .errors import Unsupported


def register() -> None:
    """Called by SGLang in each of its processes.

    Without ``--moe-runner-backend switchyard`` SGLang computes as it does. With an SGLang whose
    interface is not one that this was written for, it says so and leaves SGLang as it was: the choice
    is then none that SGLang knows.
    """
    try:
        from ._sglang_runner import install

        install()
    except (ImportError, AttributeError, Unsupported) as error:
        log.warning(
            "Switchyard does not know the interface of this SGLang, and leaves it as it is: %s. The "
            "plugin was tested with SGLang 0.5.16 and 0.5.23",
            error,
        )


__all__ = ["Deployment", "Options", "activation_of", "capacity", "options_of", "refuse", "register"]
