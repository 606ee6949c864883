// The kernels for float64.
#include "launch.cuh"

namespace dcgnn::cuda {

template cudaError_t launch_forward<double>(const ScatterForward&, cudaStream_t);
template cudaError_t launch_backward<double>(const ScatterBackward&, cudaStream_t);

}  // namespace dcgnn::cuda
