#pragma once

#include <cstdint>
#include <semaphore>
#include <string>
#include <vector>

#include "tensorflow_api.h"

namespace multiring::tensorflow {

/* A tensor in the host's memory, as the delegate sees it. */
struct HostTensor {
  int32_t type;  // of TensorFlow's DataType
  int32_t dims;
  const int64_t* shape;
  const void* input;
  void* output;  // nullptr: there is none of the same shape
};

/* The function of the process that does the work of delegated ops. It waits for nothing; at some time, in any
 * thread, multiring_tensorflow_finish_delegated is called. */
using Delegate = void (*)(void* call, int64_t communicator, const char* name, const char* asked,
                          int32_t count, const HostTensor* tensors);

/* What the attributes of a delegated node say. */
struct DelegatedSettings {
  int64_t communicator = 0;
  std::string name;
  std::string asked;         // for the delegate alone
  bool same_shapes = false;  // outputs have the shapes of the inputs; the delegate writes to them
};

/* One execution of a node whose work the delegate does. No thread of TensorFlow waits meanwhile. */
class DelegatedCall {
 public:
  static void start(const DelegatedSettings& settings, TF_OpKernelContext* context,
                    TF_AsyncOpKernelDoneCallback* done);
  void finish(int code, const char* message, int count, const HostTensor* outputs);

 private:
  DelegatedCall(const DelegatedSettings& settings, TF_OpKernelContext* context);
  ~DelegatedCall();

  bool prepare();
  bool take_outputs(int count, const HostTensor* outputs);
  bool check();
  void fail(int code, const char* message);
  void end();

  const DelegatedSettings& settings_;
  TF_OpKernelContext* context_;
  Done done_;                          // empty where the kernel waits inside compute
  std::binary_semaphore finished_{0};  // then this says that the delegate is done
  TF_Status* status_;
  std::vector<TF_Tensor*> held_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<HostTensor> tensors_;
};

}  // namespace multiring::tensorflow
