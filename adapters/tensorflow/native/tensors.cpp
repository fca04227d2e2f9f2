#include "tensors.h"

#include <sys/mman.h>
#include <unistd.h>

namespace multiring::tensorflow {
namespace {

char nothing;

constexpr size_t kFaultInFrom = size_t{1} << 20;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14
#endif

// Large memory that TensorFlow has just got from the system has no pages yet. They are made here, on one of
// its many threads, and not by the queue's only one, for which all ranks wait. Whether it works does not
// matter.
void fault_in(void* data, size_t bytes) {
  if (bytes < kFaultInFrom) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (start + page - 1) / page * page, end = (start + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
}

}  // namespace

std::vector<int64_t> dims_of(const TF_Tensor* tensor) {
  std::vector<int64_t> dims(static_cast<size_t>(api.TF_NumDims(tensor)));
  for (size_t k = 0; k < dims.size(); ++k) dims[k] = api.TF_Dim(tensor, static_cast<int>(k));
  return dims;
}

void* data_of(const TF_Tensor* tensor) {
  void* data = api.TF_TensorData(tensor);
  return data == nullptr ? &nothing : data;
}

bool add_output_like(TF_OpKernelContext* context, int index, std::vector<TF_Tensor*>& held, TF_Status* status,
                     const void** input, void** output) {
  const auto good = [&] { return api.TF_GetCode(status) == kOk; };
  TF_Tensor* source = nullptr;
  api.TF_GetInput(context, index, &source, status);
  if (!good()) return false;
  const std::vector<int64_t> dims = dims_of(source);
  // TensorFlow hands the input's memory over only if nobody else holds it.
  api.TF_DeleteTensor(source);
  int forwarded = -1;
  TF_Tensor* target = api.TF_ForwardInputOrAllocateOutput(context, &index, 1, index, dims.data(),
                                                          static_cast<int>(dims.size()), &forwarded, status);
  if (!good()) return false;
  *output = data_of(target);
  if (forwarded < 0) {
    api.TF_GetInput(context, index, &source, status);
    if (!good()) {
      api.TF_DeleteTensor(target);
      return false;
    }
    held.push_back(source);
    *input = data_of(source);
    fault_in(*output, api.TF_TensorByteSize(target));
  } else {
    *input = *output;
  }
  held.push_back(target);
  return true;
}

}  // namespace multiring::tensorflow
