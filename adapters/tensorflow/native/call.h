#pragma once

#include <cstdint>
#include <semaphore>
#include <string>
#include <vector>

#include "multiring.h"
#include "tensorflow_api.h"

namespace multiring::tensorflow {

/* What the attributes of a node say. */
struct Settings {
  mr_kind kind = MR_ALLREDUCE;
  int64_t communicator = 0;
  std::string name;
  std::vector<std::string> labels;  // of the tensors, or none
  int64_t op = MR_SUM;
  int64_t root = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  int64_t priority = 0;
  int64_t steps = 0;  // inputs that tell the step, behind the tensors: one or none
};

/* One execution of a node: from the inputs to the moment at which TensorFlow is told that it is done. Deletes
 * itself there. Every path leads to finish(), so no step of TensorFlow waits for ever. */
class Call {
 public:
  static void start(const Settings& settings, TF_OpKernelContext* context,
                    TF_AsyncOpKernelDoneCallback* done);

 private:
  Call(const Settings& settings, TF_OpKernelContext* context);
  ~Call();

  bool prepare();
  bool add_tensor(int index);
  bool add_output(int index, mr_operation& operation, std::vector<int64_t> dims);
  bool take_splits();
  bool take_step(int index);
  bool submit();
  bool take_result(const mr_work* work);
  bool copy_output(int index, int type, const std::vector<int64_t>& dims, const void* data, size_t bytes);
  bool fail(int code, const mr_error& error);
  bool refuse(const std::string& message, int code = kInvalidArgument);
  bool check();
  void finish();
  static void completed(void* context, const mr_error* error, mr_work* const* works);

  const Settings& settings_;  // the kernel outlives its executions
  TF_OpKernelContext* context_;
  Done done_;                          // empty where the kernel waits inside compute
  std::binary_semaphore finished_{0};  // then this says that the queue is done
  TF_Status* status_;
  mr_queue* queue_ = nullptr;
  uint64_t step_ = 0;
  bool running_ = false;  // counts as the one run of its name
  std::vector<mr_operation> operations_;
  std::vector<std::vector<uint64_t>> shapes_;
  std::vector<uint64_t> splits_;
  std::vector<TF_Tensor*> held_;  // inputs and outputs that the operations read and write
};

}  // namespace multiring::tensorflow
