#pragma once

#include <cstdint>
#include <vector>

#include "tensorflow_api.h"

namespace multiring::tensorflow {

std::vector<int64_t> dims_of(const TF_Tensor* tensor);

/* Never null, which to the core means that there is no array: tensors without elements may have no memory. */
void* data_of(const TF_Tensor* tensor);

/* An output of dtype and shape of the input of the same index, held by `held.back()`. Where TensorFlow has no
 * other use for the input, its memory is the output's; `input` and `output` are where the two are. False:
 * `status` says why not. */
bool add_output_like(TF_OpKernelContext* context, int index, std::vector<TF_Tensor*>& held, TF_Status* status,
                     const void** input, void** output);

}  // namespace multiring::tensorflow
