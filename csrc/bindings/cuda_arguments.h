// What the CUDA bindings share: graphs on one device and dtypes as the kernels know them. Values
// are not checked: reading them would wait for the device.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "bindings/checks.h"
#include "cuda/types.h"

namespace dcgnn {

inline cuda::DType cuda_dtype(const char* op, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return cuda::DType::kFloat32;
    case at::kDouble:
      return cuda::DType::kFloat64;
    case at::kHalf:
      return cuda::DType::kFloat16;
    case at::kBFloat16:
      return cuda::DType::kBFloat16;
    default:
      TORCH_CHECK_VALUE(false, op, ": dtype ", tensor.scalar_type(), " is not supported");
  }
}

// The device that a call runs on: that of its clusters.
inline c10::Device cuda_device(const char* op, const at::Tensor& clusters) {
  TORCH_CHECK_VALUE(clusters.is_cuda(), op, ": clusters is on ", clusters.device(),
                    ", but another argument is on a CUDA device");
  return clusters.device();
}

struct CudaGraph : GraphTensors<cuda::Graph> {
  CudaGraph(const char* op, const at::Tensor& device_of, const at::Tensor& rowptr_,
            const at::Tensor& member_, const at::Tensor& colptr_, const at::Tensor& ego_,
            const at::Tensor& slot_)
      : GraphTensors(op, rowptr_, member_, colptr_, ego_, slot_) {
    for (const auto& [name, array] : named()) {
      check_same_device(op, name, array, device_of);
      check_same_dtype(op, name, array, rowptr);
    }
  }
};

}  // namespace dcgnn
