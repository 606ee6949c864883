// The launchers: kernels of csrc/cuda on a stream of the current device. They return at once; an
// error of a launch is returned, never left behind.
#pragma once

#include <cuda_runtime_api.h>

#include "types.h"

namespace dcgnn::cuda {

cudaError_t cluster_scatter(const ScatterForward& call, cudaStream_t stream);
cudaError_t cluster_scatter_backward(const ScatterBackward& call, cudaStream_t stream);

}  // namespace dcgnn::cuda
