// Chooses the launcher by storage type.
#include "launch.h"

#include "numeric.cuh"

namespace dcgnn::cuda {

template <class T>
cudaError_t launch_forward(const ScatterForward& call, cudaStream_t stream);
template <class T>
cudaError_t launch_backward(const ScatterBackward& call, cudaStream_t stream);

cudaError_t cluster_scatter(const ScatterForward& call, cudaStream_t stream) {
  switch (call.dtype) {
    case DType::kFloat32:
      return launch_forward<float>(call, stream);
    case DType::kFloat64:
      return launch_forward<double>(call, stream);
    case DType::kFloat16:
      return launch_forward<Half>(call, stream);
    case DType::kBFloat16:
      return launch_forward<BFloat16>(call, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t cluster_scatter_backward(const ScatterBackward& call, cudaStream_t stream) {
  switch (call.dtype) {
    case DType::kFloat32:
      return launch_backward<float>(call, stream);
    case DType::kFloat64:
      return launch_backward<double>(call, stream);
    case DType::kFloat16:
      return launch_backward<Half>(call, stream);
    case DType::kBFloat16:
      return launch_backward<BFloat16>(call, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace dcgnn::cuda
