// The launchers of one storage type. Each type is a translation unit of its own, so that they
// compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "instances.cuh"

namespace dcgnn::cuda {

// Enough blocks to fill the device several times over: the hardware evens out what the grid's
// stride cannot.
inline cudaError_t max_blocks_of_device(int64_t* max_blocks) {
  constexpr int64_t kBlocksPerMultiprocessor = 32;
  int device = 0, multiprocessors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  *max_blocks = kBlocksPerMultiprocessor * multiprocessors;
  return status;
}

// Launches on a stream until one fails; keeps the first error.
struct StreamLauncher {
  cudaStream_t stream;
  cudaError_t* status;

  template <class Kernel, class Params>
  void operator()(Kernel kernel, int64_t blocks, const Params& params) const {
    if (*status != cudaSuccess) return;
    kernel<<<unsigned(blocks), kBlockThreads, 0, stream>>>(params);
    *status = cudaGetLastError();
  }
};

template <class T>
cudaError_t launch_forward(const ScatterForward& call, cudaStream_t stream) {
  int64_t max_blocks = 0;
  cudaError_t status = max_blocks_of_device(&max_blocks);
  if (status != cudaSuccess) return status;
  const StreamLauncher launch{stream, &status};
  if (call.graph.wide_index) {
    run_forward<T, int64_t>(call, max_blocks, launch);
  } else {
    run_forward<T, int32_t>(call, max_blocks, launch);
  }
  return status;
}

template <class T>
cudaError_t launch_backward(const ScatterBackward& call, cudaStream_t stream) {
  int64_t max_blocks = 0;
  cudaError_t status = max_blocks_of_device(&max_blocks);
  if (status != cudaSuccess) return status;
  const StreamLauncher launch{stream, &status};
  if (call.graph.wide_index) {
    run_backward<T, int64_t>(call, max_blocks, launch);
  } else {
    run_backward<T, int32_t>(call, max_blocks, launch);
  }
  return status;
}

}  // namespace dcgnn::cuda
