"""What the command `serve` does: a plan behind OpenAI's HTTP API, for one machine and one request at a time."""

from __future__ import annotations

import importlib.util
import re
import socket
from contextlib import ExitStack
from pathlib import Path

from planner.errors import AtsplanError
from planner.terminal import say

from . import verify
from .cli import Detect
from .commands import find_shared_plan, open_plan

_EXTRA = ("starlette", "uvicorn")  # the packages of the extra `serve`


def serve_plan(
    plan_path: Path | None,
    model: Path | None,
    detect: Detect,
    *,
    host: str,
    port: int,
    api_key: str | None,
    is_adaptive: bool = True,
    anyway: bool,
) -> None:
    """Serve until Ctrl-C. Raises AtsplanError if the plan cannot run or the address cannot be used."""
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise AtsplanError(f"serve needs {' and '.join(missing)}.", f"Install with: pip install {' '.join(missing)}")
    from . import http_api
    from .generation import Generator

    plan_path = plan_path or find_shared_plan(model, detect)
    plan, model_path = verify.read_plan(plan_path, model)
    name = re.sub(r"(-\d+-of-\d+)?\.gguf$", "", plan.model.file_name)
    with (
        _bind(host, port) as listener,
        open_plan(plan, model_path, detect, anyway=anyway, is_adaptive=is_adaptive) as (engine, _, _),
        Generator(engine) as generator,
    ):
        address, port = listener.getsockname()[:2]
        if api_key is None and not http_api.is_loopback(address):
            say("Warning: everyone who reaches this machine can use the model; --api-key asks for a key.")
        say(f"Serving {name} at http://{f'[{address}]' if ':' in address else address}:{port}/v1 (Ctrl-C stops it)")
        http_api.run(generator, name, listener, api_key)


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen yet, so that clients are refused while the model loads."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
            reason = error.strerror if isinstance(error, OSError) else error
            raise AtsplanError(
                f"Cannot listen on {host} port {port}: {reason}.", "Choose another --host or --port."
            ) from error
        stack.pop_all()
    return listener
