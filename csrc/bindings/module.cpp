// The Python module `dcgnn_kernels._native`. Importing it registers the ops of the files beside
// this one with PyTorch's dispatcher; the module itself tells how it was built and which memory it
// keeps.
#include <pybind11/pybind11.h>

#include "bindings/memory.h"
#include "cpu/types.h"

namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of dcgnn-kernels: facts about the build.";
  module.attr("torch_version") = DCGNN_TORCH_VERSION;
  module.attr("compiler") = compiler();
  module.attr("instruction_set") = dcgnn::cpu::kernels().isa;
  module.def("kept_bytes", &dcgnn::kept_bytes);
  module.def("release_memory", &dcgnn::release_kept_memory);
#ifdef DCGNN_CUDA_VERSION
  module.attr("cuda_version") = DCGNN_CUDA_VERSION;
  module.attr("cuda_architectures") = DCGNN_CUDA_ARCHITECTURES;
#else
  module.attr("cuda_version") = pybind11::none();
#endif
}
