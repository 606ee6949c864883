// The kernels for float16.
#include "launch.cuh"

namespace dcgnn::cuda {

template cudaError_t launch_forward<Half>(const ScatterForward&, cudaStream_t);
template cudaError_t launch_backward<Half>(const ScatterBackward&, cudaStream_t);

}  // namespace dcgnn::cuda
