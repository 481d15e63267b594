// The hybrid device as ggml sees it, and the memory it uses.
#pragma once

#include "ggml-backend.h"

// The GPU behind the hybrid device: chosen once, by ATSPLAN_DEVICE, else the first CUDA device, else the simulated one.
// Null if ATSPLAN_DEVICE names one that is not there; the plug-in then refuses to load.
ggml_backend_dev_t ats_inner_device();

// Pinned host memory for weights that the hybrid device computes on either lane. A type of its own, so that llama.cpp's
// scheduler keeps copying graph inputs to VRAM instead of letting kernels read them over PCIe again and again.
ggml_backend_buffer_type_t ats_host_buffer_type();

// True for a weight in that memory.
bool ats_is_host_weight(const ggml_tensor * tensor);

// False for a buffer of ats_host_buffer_type() that could not be pinned: GPU kernels must not read it.
bool ats_is_pinned(ggml_backend_buffer_t buffer);

// Host memory for activations, pinned if possible, or null.
ggml_backend_buffer_t ats_alloc_activations(size_t size, bool & is_pinned);

// Bytes of ats_host_buffer_type() that are held and not pinned.
int64_t ats_unpinned_bytes();
