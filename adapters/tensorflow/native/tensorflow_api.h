#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

/* The part of TensorFlow's C API that the ops need (c/ops.h, c/kernels.h, c/tf_tensor.h, c/tf_status.h),
 * declared here so that nothing of TensorFlow is needed to compile. The functions are looked up once, in the
 * TensorFlow that this process has loaded. */
namespace multiring::tensorflow {

struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;

/* Values of TensorFlow's enums TF_Code and TF_DataType. */
enum Code { kOk = 0, kInvalidArgument = 3, kFailedPrecondition = 9 };
enum DataType {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kComplex64 = 8,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kComplex128 = 18,
  kHalf = 19,
  kUint32 = 22,
  kUint64 = 23
};

using CreateFunction = void* (*)(TF_OpKernelConstruction*);
using ComputeFunction = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteFunction = void (*)(void*);
using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// name, result, arguments
#define MULTIRING_TENSORFLOW_FUNCTIONS(F)                                                                    \
  F(TF_NewStatus, TF_Status*, ())                                                                            \
  F(TF_DeleteStatus, void, (TF_Status*))                                                                     \
  F(TF_SetStatus, void, (TF_Status*, int, const char*))                                                      \
  F(TF_GetCode, int, (const TF_Status*))                                                                     \
  F(TF_Message, const char*, (const TF_Status*))                                                             \
  F(TF_TensorType, int, (const TF_Tensor*))                                                                  \
  F(TF_NumDims, int, (const TF_Tensor*))                                                                     \
  F(TF_Dim, int64_t, (const TF_Tensor*, int))                                                                \
  F(TF_TensorData, void*, (const TF_Tensor*))                                                                \
  F(TF_TensorByteSize, size_t, (const TF_Tensor*))                                                           \
  F(TF_DataTypeSize, size_t, (int))                                                                          \
  F(TF_DeleteTensor, void, (TF_Tensor*))                                                                     \
  F(TF_NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                                       \
  F(TF_OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                             \
  F(TF_OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                            \
  F(TF_OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                           \
  F(TF_OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                              \
  F(TF_OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, ShapeFunction))         \
  F(TF_RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                                    \
  F(TF_NewAsyncKernelBuilder, TF_KernelBuilder*,                                                             \
    (const char*, const char*, CreateFunction, ComputeFunction, DeleteFunction))                             \
  F(TF_RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                            \
  F(TF_RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                                  \
  F(TF_NumInputs, int, (TF_OpKernelContext*))                                                                \
  F(TF_GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                  \
  F(TF_OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                           \
  F(TF_OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                                     \
  F(TF_OpKernelConstruction_GetAttrSize, void,                                                               \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                                 \
  F(TF_OpKernelConstruction_GetAttrInt64, void,                                                              \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                                           \
  F(TF_OpKernelConstruction_GetAttrString, void,                                                             \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                                      \
  F(TF_OpKernelConstruction_GetAttrStringList, void,                                                         \
    (TF_OpKernelConstruction*, const char*, char**, size_t*, int, void*, size_t, TF_Status*))                \
  F(TF_AllocateOutput, TF_Tensor*, (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*)) \
  F(TF_ForwardInputOrAllocateOutput, TF_Tensor*,                                                             \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))                      \
  F(TF_ShapeInferenceContextNumInputs, int64_t, (TF_ShapeInferenceContext*))                                 \
  F(TF_NewShapeHandle, TF_ShapeHandle*, ())                                                                  \
  F(TF_DeleteShapeHandle, void, (TF_ShapeHandle*))                                                           \
  F(TF_ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))   \
  F(TF_ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))  \
  F(TF_ShapeInferenceContextVectorFromSize, TF_ShapeHandle*, (TF_ShapeInferenceContext*, size_t))            \
  F(TF_ShapeInferenceContextRank, int64_t, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                     \
  F(TF_ShapeInferenceContextRankKnown, int, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                    \
  F(TF_ShapeInferenceContextWithRankAtLeast, void,                                                           \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))                      \
  F(TF_ShapeInferenceContextSubshape, void,                                                                  \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))             \
  F(TF_ShapeInferenceContextConcatenateShapes, void,                                                         \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))              \
  F(TF_ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))

/* The functions that were found. */
struct Api {
#define MULTIRING_DECLARE(name, result, arguments) result(*name) arguments = nullptr;
  MULTIRING_TENSORFLOW_FUNCTIONS(MULTIRING_DECLARE)
#undef MULTIRING_DECLARE
};

extern Api api;

/* Whether kernels may go on after their compute function has returned. TensorFlow's asynchronous kernels of
 * the C API get a pointer to a std::function<void()> on the caller's stack, which is gone when compute
 * returns, so it has to be moved out; that is only safe if TensorFlow's std::function is this compiler's.
 * load_api finds out by a symbol with that type in its name. Otherwise kernels wait inside compute. */
extern bool done_can_be_moved;
using Done = std::function<void()>;

/* Looks all functions up; what is wrong, or an empty text. */
std::string load_api();

}  // namespace multiring::tensorflow
