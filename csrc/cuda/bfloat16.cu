// The kernels for bfloat16.
#include "launch.cuh"

namespace dcgnn::cuda {

template cudaError_t launch_forward<BFloat16>(const ScatterForward&, cudaStream_t);
template cudaError_t launch_backward<BFloat16>(const ScatterBackward&, cudaStream_t);

}  // namespace dcgnn::cuda
