"""Whatever ends the process that does the work, one clear line and an exit status remain."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime import child, supervise

ROOT = Path(supervise.__file__).parents[1]


def command(body: str) -> list[str]:
    """Return a command that supervises `body` and prints its own errors as the command line does."""
    lines = [
        "import os, signal, sys, time",
        "from runtime.supervise import supervise",
        "try: supervise()",
        "except Exception as error: sys.exit(str(error))",
        body,
    ]
    return [sys.executable, "-c", "\n".join(lines)]


def start(body: str) -> subprocess.Popen[str]:
    """Start `body` and wait for its first line."""
    process = subprocess.Popen(command(body), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(body), cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)


def test_the_child_has_stdout_stderr_and_the_exit_status() -> None:
    result = run("print('text'); print('warning', file=sys.stderr); os.write(2, b'native noise'); sys.exit(7)")
    assert (result.returncode, result.stdout, result.stderr) == (7, "text\n", "warning\n")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "os.write(2, b'/a/ops.cpp:41: GGML_ASSERT(eps >= 0.0f) failed\\nnoise\\n'); os.abort()",
            "llama.cpp gave up (SIGABRT): GGML_ASSERT(eps >= 0.0f) failed The model file may be damaged",
        ),
        (
            # As ggml's CUDA backend ends a process: the reason goes to the log, and the abort does not repeat it.
            "import ctypes, llama_cpp._ggml\n"
            "from runtime.session import CapturedLog\n"
            "ggml = ctypes.CDLL('libggml.so', handle=llama_cpp._ggml.libggml._handle)\n"
            "with CapturedLog():\n"
            "    ggml.ggml_log_internal(4, b'CUDA error: out of memory\\n')\n"
            "    ggml.ggml_log_internal(4, b'  current device: 0\\n')\n"
            "    ggml.ggml_abort(b'/a/ggml-cuda.cu', 109, b'CUDA error')",
            "llama.cpp gave up (SIGABRT): CUDA error: out of memory Close what uses the GPU",
        ),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "llama.cpp gave up (SIGSEGV): it gave no reason"),
        ("os.kill(os.getpid(), signal.SIGFPE)", "llama.cpp gave up (SIGFPE)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended atsplan (SIGKILL): it probably ran out of host memory"),
    ],
)
def test_a_violent_end_is_one_line(body: str, message: str, tmp_path: Path) -> None:
    result = run(f"os.chdir({str(tmp_path)!r}); print('so far', flush=True); {body}")
    assert result.returncode == 1
    assert result.stdout == "so far\n"
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []  # no core dump


def test_signals_reach_the_child() -> None:
    waits = "try: print(flush=True); time.sleep(20)\nexcept KeyboardInterrupt: print('stopped'); sys.exit(130)"
    process = start(waits)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("stopped\n", "")
    assert process.returncode == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        process = start(waits)
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "")
        assert process.returncode == 128 + number


def test_three_interrupts_end_what_does_not_listen() -> None:
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(20)")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


def test_the_child_does_not_outlive_its_parent() -> None:
    process = start("print(flush=True); time.sleep(20)")
    process.kill()
    assert process.communicate(timeout=30) == ("", "")  # the pipes close when nobody holds them


def test_ctrl_c_in_a_terminal_is_received_once() -> None:
    body = (
        "n = 0\n"
        "def count(*_):\n"
        "    global n\n"
        "    n += 1\n"
        "signal.signal(signal.SIGINT, count)\n"
        "print('ready', flush=True)\n"
        "time.sleep(0.6)\n"
        "print(f'received {n}')"
    )
    arguments = command(body)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(arguments[0], arguments)
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 100)
    os.write(terminal, b"\x03")
    while b"received 1" not in seen:
        assert b"received 2" not in seen
        seen += os.read(terminal, 100)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_a_child_whose_parent_died_before_it_could_notice_does_nothing() -> None:
    result = subprocess.run(
        child.command("runtime.routing"), env=child.environment() | {"ATSPLAN_PARENT": "1"}, input="[]",
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGTERM, "", "")
