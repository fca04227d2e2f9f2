/* The ops: their signatures and shape functions. All are stateful, so that TensorFlow neither folds, merges
 * nor prunes them; the Python part tells tf.function that their order does not matter, since they are matched
 * by name. */
#include <optional>
#include <string>
#include <vector>

#include "kernels.h"
#include "tensorflow_api.h"

namespace multiring::tensorflow {
namespace {

#define MULTIRING_TYPES                                                                              \
  "{bool, int8, uint8, int16, uint16, int32, uint32, int64, uint64, half, bfloat16, float, double, " \
  "complex64, complex128}"

void same_shapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeHandle* shape = api.TF_NewShapeHandle();
  TF_Status* no_output = api.TF_NewStatus();  // the last input may be the step, which has none
  const int64_t count = api.TF_ShapeInferenceContextNumInputs(context);
  for (int index = 0; index < count && api.TF_GetCode(status) == kOk; ++index) {
    api.TF_ShapeInferenceContextGetInput(context, index, shape, status);
    const bool last = index > 0 && index == count - 1;
    if (api.TF_GetCode(status) == kOk)
      api.TF_ShapeInferenceContextSetOutput(context, index, shape, last ? no_output : status);
  }
  api.TF_DeleteStatus(no_output);
  api.TF_DeleteShapeHandle(shape);
}

// The first output has the input's shape but for the first dimension, which only the run will tell.
void other_rows(TF_ShapeInferenceContext* context, TF_Status* status, bool scalars) {
  TF_ShapeHandle* input = api.TF_NewShapeHandle();
  TF_ShapeHandle* rest = api.TF_NewShapeHandle();
  TF_ShapeHandle* result = api.TF_NewShapeHandle();
  TF_ShapeHandle* rows = api.TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1));
  const auto good = [&] { return api.TF_GetCode(status) == kOk; };
  api.TF_ShapeInferenceContextGetInput(context, 0, input, status);
  if (good() && api.TF_ShapeInferenceContextRankKnown(context, input)) {
    if (scalars && api.TF_ShapeInferenceContextRank(context, input) == 0) {
      api.TF_ShapeInferenceContextSetOutput(context, 0, rows, status);
    } else {
      api.TF_ShapeInferenceContextWithRankAtLeast(context, input, 1, input, status);
      const int64_t rank = good() ? api.TF_ShapeInferenceContextRank(context, input) : 0;
      if (good()) api.TF_ShapeInferenceContextSubshape(context, input, 1, rank, rest, status);
      if (good()) api.TF_ShapeInferenceContextConcatenateShapes(context, rows, rest, result, status);
      if (good()) api.TF_ShapeInferenceContextSetOutput(context, 0, result, status);
    }
  }
  for (TF_ShapeHandle* shape : {input, rest, result, rows}) api.TF_DeleteShapeHandle(shape);
}

void block_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  api.TF_ShapeInferenceContextSetUnknownShape(context, status);
  if (api.TF_GetCode(status) == kOk) other_rows(context, status, false);
}

void joined_shape(TF_ShapeInferenceContext* context, TF_Status* status, bool scalars) {
  api.TF_ShapeInferenceContextSetUnknownShape(context, status);
  TF_ShapeHandle* ranks = api.TF_ShapeInferenceContextVectorFromSize(context, static_cast<size_t>(-1));
  if (api.TF_GetCode(status) == kOk) api.TF_ShapeInferenceContextSetOutput(context, 1, ranks, status);
  api.TF_DeleteShapeHandle(ranks);
  if (api.TF_GetCode(status) == kOk) other_rows(context, status, scalars);
}

void unknown_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  api.TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void gathered_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  joined_shape(context, status, true);
}

void exchanged_shape(TF_ShapeInferenceContext* context, TF_Status* status) {
  joined_shape(context, status, false);
}

using Texts = std::vector<const char*>;

struct Signature {
  const char* name;
  std::optional<mr_kind> kind;  // none: counts steps, or is delegated
  Texts inputs, outputs, attributes;
  ShapeFunction shapes;
};

std::string register_op(const Signature& signature) {
  TF_OpDefinitionBuilder* builder = api.TF_NewOpDefinitionBuilder(signature.name);
  for (const char* attribute : signature.attributes) api.TF_OpDefinitionBuilderAddAttr(builder, attribute);
  for (const char* attribute : {"communicator: int", "tensor_name: string", "priority: int = 0"}) {
    api.TF_OpDefinitionBuilderAddAttr(builder, attribute);
  }
  for (const char* input : signature.inputs) api.TF_OpDefinitionBuilderAddInput(builder, input);
  for (const char* output : signature.outputs) api.TF_OpDefinitionBuilderAddOutput(builder, output);
  api.TF_OpDefinitionBuilderSetIsStateful(builder, true);
  api.TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, signature.shapes);
  TF_Status* status = api.TF_NewStatus();
  api.TF_RegisterOpDefinition(builder, status);
  std::string message = api.TF_GetCode(status) == kOk ? "" : api.TF_Message(status);
  api.TF_DeleteStatus(status);
  if (!message.empty()) return message;
  return signature.kind ? register_kernel(signature.name, *signature.kind)
                        : register_other_kernel(signature.name);
}

std::string register_all() {
  if (std::string message = load_api(); !message.empty()) return message;
  constexpr const char* list = "T: list(" MULTIRING_TYPES ") >= 1";
  constexpr const char* type = "T: " MULTIRING_TYPES;
  constexpr const char* steps = "N: int >= 0";
  const std::vector<Signature> signatures{
      {"MultiringAllreduce",
       MR_ALLREDUCE,
       {"tensors: T", "step: N * int64"},
       {"results: T"},
       {list, steps, "reduce_op: int", "prescale_bits: int", "postscale_bits: int",
        "labels: list(string) = []"},
       same_shapes},
      {"MultiringBroadcast", MR_BROADCAST, {"tensors: T"}, {"results: T"}, {list, "root: int"}, same_shapes},
      {"MultiringReduceScatter",
       MR_REDUCE_SCATTER,
       {"tensor: T"},
       {"block: T"},
       {type, "reduce_op: int", "prescale_bits: int", "postscale_bits: int"},
       block_shape},
      {"MultiringAllgather",
       MR_ALLGATHER,
       {"tensor: T", "step: N * int64"},
       {"joined: T", "rows: int64"},
       {type, steps},
       gathered_shape},
      {"MultiringAlltoall",
       MR_ALLTOALL,
       {"tensor: T", "splits: int64"},
       {"joined: T", "rows: int64"},
       {type},
       exchanged_shape},
      {"MultiringStep", {}, {}, {"step: int64"}, {}, unknown_shape},
      {"MultiringDelegated",
       {},
       {"tensors: Tin"},
       {"results: Tout"},
       {"Tin: list(" MULTIRING_TYPES ") >= 0", "Tout: list(" MULTIRING_TYPES ") >= 1", "asked: string",
        "same_shapes: int"},
       unknown_shape},
  };
  for (const Signature& signature : signatures) {
    if (std::string message = register_op(signature); !message.empty()) return message;
  }
  return "";
}

// Runs while TensorFlow loads this library, which is when it looks for new ops. An exception has no place
// here.
const std::string& load_error() {
  static const std::string* const message = new std::string(register_all());
  return *message;
}

[[maybe_unused]] const bool loaded = load_error().empty();

}  // namespace
}  // namespace multiring::tensorflow

/* Why the ops were not registered; empty if they were. Called by the Python part. */
extern "C" __attribute__((visibility("default"))) const char* multiring_tensorflow_load_error() {
  return multiring::tensorflow::load_error().c_str();
}
