"""The C side as ctypes sees it: structures, callbacks and prototypes of atsplan.h, and of what llama_cpp does not bind.

Everything mirrors a header; for atsplan.h, a test asks the compiler whether it still does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

API_VERSION = 1

Prototypes = Mapping[str, tuple[Any, list[Any]]]  # name -> result, arguments


class StatisticsStruct(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "n_graphs", "n_compiles", "total_ns", "cpu_ns", "wait_gpu_ns", "launch_ns", "copy_issue_ns",
            "streamed_bytes", "activation_bytes", "n_cpu_steps", "n_gpu_steps", "n_streamed", "n_slot_stalls",
            "link_busy_ns", "ring_bytes", "pinned_bytes", "n_experts_resident", "n_experts_streamed", "n_experts_cpu",
            "expert_bytes", "unpinned_bytes", "expert_cpu_ns", "expert_gpu_ns", "expert_decide_ns",
            "n_experts_predicted", "n_experts_predicted_used",
        )
    ]  # fmt: skip


class WeightUseStruct(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("op", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("shape", ctypes.c_int64 * 4),
        ("size_bytes", ctypes.c_int64),
        ("input_bytes", ctypes.c_int64),
        ("output_bytes", ctypes.c_int64),
        ("n_experts_used", ctypes.c_int32),
        ("is_input", ctypes.c_bool),
        ("node", ctypes.c_int32),
        ("inputs", ctypes.c_int32 * 8),
    ]


class MemoryStruct(ctypes.Structure):
    _fields_ = [
        ("buffer_type", ctypes.c_char_p),
        ("is_host", ctypes.c_bool),
        ("model_bytes", ctypes.c_int64),
        ("context_bytes", ctypes.c_int64),
        ("compute_bytes", ctypes.c_int64),
    ]


class MatmulSpecStruct(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 3),
        ("n_experts_used", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("weights", ctypes.c_void_p),
        ("weights_bytes", ctypes.c_int64),
        ("cold_bytes", ctypes.c_int64),
    ]


class ContentionStruct(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double) for name in ("cpu_alone", "cpu_while_link_busy", "link_alone", "link_while_cpu_busy")
    ]


WeightCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(WeightUseStruct))
MemoryCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(MemoryStruct))
RoutingCallback = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int32
)
LocationCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool)
OpCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)

_STRINGS = ctypes.POINTER(ctypes.c_char_p)
_INT32S = ctypes.POINTER(ctypes.c_int32)
_INT64S = ctypes.POINTER(ctypes.c_int64)
_DOUBLES = ctypes.POINTER(ctypes.c_double)
_BOOLS = ctypes.POINTER(ctypes.c_bool)

HELPER_PROTOTYPES: Prototypes = {
    "ats_api_version": (ctypes.c_int, []),
    "ats_build_stamp": (ctypes.c_char_p, []),
    "ats_last_error": (ctypes.c_char_p, []),
    "ats_set_classes": (ctypes.c_int, [_STRINGS, _INT32S, _INT32S, ctypes.c_int32]),
    "ats_set_option": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_int64]),
    "ats_get_option": (ctypes.c_int, [ctypes.c_char_p, _INT64S]),
    "ats_get_statistics": (ctypes.c_int, [ctypes.POINTER(StatisticsStruct), ctypes.c_bool]),
    "ats_choose_transfers": (
        ctypes.c_int, [ctypes.c_int32, _DOUBLES, _DOUBLES, _DOUBLES, _DOUBLES, _BOOLS, _BOOLS, _DOUBLES],
    ),
    "ats_trace_weights": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32, WeightCallback, ctypes.c_void_p]),
    "ats_memory_breakdown": (ctypes.c_int, [ctypes.c_void_p, MemoryCallback, ctypes.c_void_p]),
    "ats_weight_locations": (ctypes.c_int, [ctypes.c_void_p, LocationCallback, ctypes.c_void_p]),
    "ats_unsupported_ops": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32, OpCallback, ctypes.c_void_p]),
    "ats_bench_matmul": (
        ctypes.c_int,
        [ctypes.c_char_p, ctypes.c_int32, ctypes.POINTER(MatmulSpecStruct), ctypes.c_int32, ctypes.c_int32, _INT64S],
    ),
    "ats_bench_glue": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32, ctypes.c_int32, _INT64S]),
    "ats_bench_transfer": (
        ctypes.c_int,
        [ctypes.c_bool, ctypes.c_bool, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, _INT64S],
    ),
    "ats_bench_crossing": (
        ctypes.c_int,
        [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, _INT64S],
    ),
    "ats_bench_host": (
        ctypes.c_int,
        [
            ctypes.c_int32, ctypes.POINTER(MatmulSpecStruct), ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
            _INT64S, _INT64S, _INT64S,
        ],
    ),
    "ats_bench_queues": (ctypes.c_int, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, _INT64S, _INT64S]),
    "ats_bench_contention": (
        ctypes.c_int,
        [
            ctypes.c_int32, ctypes.POINTER(MatmulSpecStruct), ctypes.c_int64, ctypes.c_int64,
            ctypes.POINTER(ContentionStruct),
        ],
    ),
    "ats_bench_experts": (
        ctypes.c_int,
        [_INT64S, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32, _INT64S],
    ),
    "ats_routing_create": (ctypes.c_void_p, []),
    "ats_routing_free": (None, [ctypes.c_void_p]),
    "ats_routing_eval": (ctypes.c_bool, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p]),
    "ats_routing_read": (None, [ctypes.c_void_p, RoutingCallback, ctypes.c_void_p]),
    "ats_bench_release": (ctypes.c_int, []),
    "ats_device_memory": (ctypes.c_int, [_INT64S, _INT64S]),
}  # fmt: skip


class DevicePropertiesStruct(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 5),
    ]


GGML_PROTOTYPES: Prototypes = {
    "ggml_backend_dev_count": (ctypes.c_size_t, []),
    "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
    "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_backend_dev_get_props": (None, [ctypes.c_void_p, ctypes.POINTER(DevicePropertiesStruct)]),
    "ggml_backend_dev_buffer_type": (ctypes.c_void_p, [ctypes.c_void_p]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [ctypes.c_void_p]),
    "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
}  # fmt: skip


def declare(library: ctypes.CDLL, prototypes: Prototypes) -> None:
    """Tell ctypes the prototypes. Raises AttributeError if the library lacks one of the functions."""
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
