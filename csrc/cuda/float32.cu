// The kernels for float32.
#include "launch.cuh"

namespace dcgnn::cuda {

template cudaError_t launch_forward<float>(const ScatterForward&, cudaStream_t);
template cudaError_t launch_backward<float>(const ScatterBackward&, cudaStream_t);

}  // namespace dcgnn::cuda
