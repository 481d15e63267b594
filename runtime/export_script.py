"""A plan as a Python script for stock llama-cpp-python.

Its high-level class does not pass devices and placements on to llama.cpp, so the script sets them in the defaults that
the class starts from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.plan import Plan

_WITH_HELPER = """\
if not ggml.ggml_backend_load(os.environ["GGML_BACKEND_PATH"].encode()):
    raise SystemExit("llama.cpp does not accept atsplan's helper.")
host_memory = ggml.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_name(b"{host_device}"))
"""
_WITHOUT_HELPER = "host_memory = ggml.ggml_backend_cpu_buffer_type()\n"
_SCRIPT = """\
# {title}
import ctypes
import os

{environment}
import llama_cpp._ggml

HOST_WEIGHTS = [
{patterns}
]


class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


ggml = llama_cpp._ggml.libggml
for name in ("load", "dev_by_name", "dev_buffer_type", "cpu_buffer_type"):
    getattr(ggml, f"ggml_backend_{{name}}").restype = ctypes.c_void_p
ggml.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
{host_memory}devices = (ctypes.c_void_p * 2)({device}, None)
overrides = (Override * (len(HOST_WEIGHTS) + 1))(*(Override(name.encode(), host_memory) for name in HOST_WEIGHTS))
model_defaults = llama_cpp.llama_cpp.llama_model_default_params
context_defaults = llama_cpp.llama_cpp.llama_context_default_params


def model_params():
    params = model_defaults()
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    params.use_extra_bufts = False
    return params


def context_params():
    params = context_defaults()
    params.n_outputs_max = 1
    return params


llama_cpp.llama_cpp.llama_model_default_params = model_params
llama_cpp.llama_cpp.llama_context_default_params = context_params

llama = llama_cpp.Llama(
    model_path={model!r},
    n_gpu_layers=-1,
    use_mmap=False,
    n_ctx={n_context},
    n_batch={n_ubatch},
    n_ubatch={n_ubatch},
    n_threads={n_threads},
    n_threads_batch={n_threads},
    type_k=llama_cpp.GGML_TYPE_{type_k},
    type_v=llama_cpp.GGML_TYPE_{type_v},
    flash_attn={flash_attention},
    verbose=False,
)

if __name__ == "__main__":
    for piece in llama("Gravity is", max_tokens=64, temperature=0.0, stream=True):
        print(piece["choices"][0]["text"], end="", flush=True)
    print()
"""


def python_script(
    plan: Plan, model: Path, patterns: Sequence[str], environment: Mapping[str, str], device: str, host_device: str
) -> str:
    """Return the script. `device` computes, "" for the CPU alone; `host_device` is the helper's, "" without it."""
    workload = plan.workload
    title = f"{plan.model.name} under a plan of atsplan {plan.software.atsplan}"
    return _SCRIPT.format(
        title=" ".join(f"{title}, for llama-cpp-python {plan.software.llama_cpp_python}.".split()),
        environment="".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in environment.items()),
        patterns="\n".join(f"    {pattern!r}," for pattern in patterns),
        host_memory=_WITH_HELPER.format(host_device=host_device) if host_device else _WITHOUT_HELPER,
        device=f'ggml.ggml_backend_dev_by_name(b"{device}")' if device else "None",
        model=str(model),
        n_context=workload.n_context,
        n_ubatch=workload.n_ubatch,
        n_threads=workload.n_threads,
        type_k=workload.type_k.upper(),
        type_v=workload.type_v.upper(),
        flash_attention=workload.flash_attention,
    )
