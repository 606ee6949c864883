// Memory of large outputs: huge pages, kept for the next output of about the same size.
//
// The first touch of a fresh page costs a fault and its zeroing, often more than the kernel that
// writes it, and rows gathered at random from small pages miss the TLB. So that outputs of
// kLargeBytes and more come from 2 MB pages, and a block that is given back is kept, oldest out
// first, as long as the kept ones stay within a limit. Large working memory of the kernels comes
// from there too.
#pragma once

#include <ATen/core/Tensor.h>

namespace dcgnn {

// An uninitialised tensor.
at::Tensor empty_output(at::IntArrayRef shape, const at::TensorOptions& options);

// Bytes that are kept and not in use.
int64_t kept_bytes();

// Gives all kept memory back to the system; returns how many bytes that were.
int64_t release_kept_memory();

}  // namespace dcgnn
