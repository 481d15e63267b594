"""Which llama.cpp is installed and which GPUs CUDA would give this process, without loading or starting either."""

from __future__ import annotations

import ctypes
import uuid

from .build import find_llama

_CUDA_SUCCESS = 0


def llama_cpp_commit() -> str:
    """Return the commit that llama.cpp was built from, or "" where the build did not know it."""
    # By the name under which the other libraries ask for it: libggml-base.so would be a second copy.
    library = ctypes.CDLL(str(find_llama().library_folder / "libggml-base.so.0"))
    library.ggml_commit.restype = ctypes.c_char_p
    library.ggml_commit.argtypes = []
    commit: bytes = library.ggml_commit()
    return commit.decode().removesuffix("-dirty").replace("unknown", "")


def cuda_gpu_uuids() -> tuple[str, ...]:
    """Return the UUIDs, without prefix, of the GPUs (or MIG instances) in CUDA's order: the first is cuda0.

    The driver applies CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Empty without a driver or a visible GPU. Takes no
    GPU memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    cuda.cuInit.argtypes = [ctypes.c_uint]
    cuda.cuDeviceGetCount.argtypes = [ctypes.POINTER(ctypes.c_int)]
    cuda.cuDeviceGet.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_int]
    cuda.cuDeviceGetUuid_v2.argtypes = [ctypes.POINTER(ctypes.c_ubyte * 16), ctypes.c_int]
    count = ctypes.c_int()
    if cuda.cuInit(0) != _CUDA_SUCCESS or cuda.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return ()
    found = []
    for index in range(count.value):
        device, identifier = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        if cuda.cuDeviceGet(ctypes.byref(device), index) != _CUDA_SUCCESS:
            return ()
        if cuda.cuDeviceGetUuid_v2(ctypes.byref(identifier), device) != _CUDA_SUCCESS:
            return ()
        found.append(str(uuid.UUID(bytes=bytes(identifier))))
    return tuple(found)
