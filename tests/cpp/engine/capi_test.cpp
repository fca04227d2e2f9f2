// The C ABI, used as native code of an adapter does: a queue that C++ has made, operations submitted by C.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "capi/queue.h"
#include "multiring.h"
#include "support/errors.h"
#include "support/fake_gpu.h"
#include "support/named.h"
#include "support/rank_group.h"

namespace {

using namespace multiring::testing;

/// Runs `body` on `size` ranks, each with a queue.
void on_queues(int size, const std::function<void(mr_queue*)>& body) {
  RankGroup({TransportKind::kShm, size}).run([&](multiring::Communicator& world) {
    mr_queue queue(queue_over(world));
    EXPECT_EQ(mr_queue_rank(&queue), world.rank());
    EXPECT_EQ(mr_queue_size(&queue), size);
    body(&queue);
    queue.close();
  });
}

struct Vector {
  std::vector<float> values;
  std::uint64_t extent;
  explicit Vector(std::vector<float> filled) : values(std::move(filled)), extent(values.size()) {}

  mr_operation operation(mr_kind kind, const char* name = nullptr) {
    mr_operation made = MR_OPERATION_INIT;
    made.kind = kind;
    made.name = name;
    made.input = values.data();
    made.output = values.data();
    made.output_bytes = values.size() * sizeof(float);
    made.dims = 1;
    made.shape = &extent;
    return made;
  }
};

/// What `done` was told.
struct Told {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::vector<mr_error> errors;

  static void done(void* context, const mr_error* error, mr_work* const*) {
    auto* told = static_cast<Told*>(context);
    const std::lock_guard lock(told->mutex);
    told->errors.push_back(error != nullptr ? *error : mr_error MR_ERROR_INIT);
    told->changed.notify_all();
  }
  mr_error await(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return errors.size() >= count; });
    return errors[count - 1];
  }
};

mr_status submit(mr_queue* queue, const char* name, const mr_operation& operation, Told* told,
                 mr_error* error = nullptr) {
  mr_submission submission = MR_SUBMISSION_INIT;
  submission.name = name;
  submission.operations = &operation;
  submission.count = 1;
  submission.done = Told::done;
  submission.context = told;
  return mr_queue_submit(queue, &submission, error);
}

std::string text_of(const mr_error& error) {
  char text[sizeof error.message + 64];
  mr_error_text(&error, text, sizeof text);
  return text;
}

TEST(CApi, MatchesByName) {
  on_queues(3, [](mr_queue* queue) {
    const char* names[] = {"a", "b", "c"};
    std::vector<Vector> vectors;
    for (int i = 0; i < 3; ++i) vectors.emplace_back(std::vector<float>(5, static_cast<float>(i)));
    Told told;
    for (int i = 0; i < 3; ++i) {
      const int mine = (i + mr_queue_rank(queue)) % 3;
      const mr_operation sum = vectors[static_cast<std::size_t>(mine)].operation(MR_ALLREDUCE);
      ASSERT_EQ(submit(queue, names[mine], sum, &told), MR_OK);
    }
    told.await(3);
    for (const mr_error& error : told.errors) EXPECT_EQ(error.status, MR_OK) << error.message;
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(vectors[static_cast<std::size_t>(i)].values,
                std::vector<float>(5, 3.0F * static_cast<float>(i)));
  });
}

TEST(CApi, GivesGroupsAndWhatWasAllocated) {
  on_queues(2, [](mr_queue* queue) {
    Vector x(std::vector<float>(static_cast<std::size_t>(mr_queue_rank(queue) + 1), 1.0F));
    Vector y(std::vector<float>(4, 2.0F));
    mr_operation operations[] = {x.operation(MR_ALLGATHER), y.operation(MR_ALLREDUCE, "y")};
    operations[0].output = nullptr;
    struct Answer {
      Told told;
      std::vector<float> joined;
      std::vector<uint64_t> rows;
    } answer;
    const mr_done done = [](void* context, const mr_error* error, mr_work* const* works) {
      auto* to = static_cast<Answer*>(context);
      to->rows.resize(2);
      size_t bytes = 0;
      const auto* data = static_cast<const float*>(mr_work_result(works[0], &bytes, to->rows.data()));
      to->joined.assign(data, data + bytes / sizeof(float));
      Told::done(&to->told, error, works);
    };
    mr_submission submission = MR_SUBMISSION_INIT;
    submission.name = "group";
    submission.operations = operations;
    submission.count = 2;
    submission.done = done;
    submission.context = &answer;
    ASSERT_EQ(mr_queue_submit(queue, &submission, nullptr), MR_OK);
    EXPECT_EQ(answer.told.await(1).status, MR_OK);
    EXPECT_EQ(answer.joined, std::vector<float>(3, 1.0F));
    EXPECT_EQ(answer.rows, (std::vector<uint64_t>{1, 2}));
    EXPECT_EQ(y.values, std::vector<float>(4, 4.0F));
  });
}

/// Floats on a device, which a kernel of a stream of their own makes.
struct OnDevice {
  OnDevice(FakeGpu& gpu, int device, std::vector<float> values)
      : gpu(gpu), bytes(values.size() * sizeof(float)), stream(gpu.make_stream(device)) {
    address = gpu.allocate(device, bytes);
    gpu.launch(stream, [to = gpu.view(address), values = std::move(values)] {
      std::memcpy(to, values.data(), values.size() * sizeof(float));
    });
  }
  void* handle() const { return reinterpret_cast<void*>(stream); }

  FakeGpu& gpu;
  const std::size_t bytes;
  const std::uintptr_t stream;
  std::byte* address;
};

void expect_to_work_on_devices(FakeGpu& gpu) {
  on_queues(2, [&](mr_queue* queue) {
    const int rank = mr_queue_rank(queue);
    const OnDevice x(gpu, rank, std::vector<float>(5, static_cast<float>(rank + 1)));
    std::byte* const y = gpu.allocate(rank, x.bytes);
    const std::uint64_t extent = 5;
    mr_error error = MR_ERROR_INIT;
    ASSERT_EQ(mr_device_copy(queue, y, x.address, x.bytes, x.handle(), &error), MR_OK) << error.message;
    mr_operation sum = MR_OPERATION_INIT;
    sum.input = sum.output = y;
    sum.output_bytes = x.bytes;
    sum.dims = 1;
    sum.shape = &extent;
    sum.on_device = 1;
    sum.stream = x.handle();
    Told told;
    ASSERT_EQ(submit(queue, "sum", sum, &told, &error), MR_OK) << error.message;
    EXPECT_EQ(told.await(1).status, MR_OK);
    std::vector<float> found(5);
    ASSERT_EQ(mr_device_read(queue, found.data(), y, x.bytes, x.handle(), &error), MR_OK) << error.message;
    EXPECT_EQ(found, std::vector<float>(5, 3.0F));

    sum.input = sum.output = found.data();
    EXPECT_EQ(submit(queue, "host", sum, &told, &error), MR_USAGE);
    expect_text(error.message, "allreduce");
    expect_text(error.message, "does not lie in a device's memory");
    EXPECT_EQ(mr_queue_is_broken(queue), 0);
  });
}

void expect_errors_of_devices(FakeGpu& gpu) {
  for (const bool hangs : {true, false}) {
    RankGroup({TransportKind::kShm, 1}).run([&](multiring::Communicator& world) {
      world.set_timeout(0.2);
      mr_queue queue(queue_over(world));
      const OnDevice x(gpu, 0, std::vector<float>(5, 1.0F));
      gpu.launch(x.stream, [] {}, !hangs);
      if (!hangs) gpu.fail_next("copy_to_host", 700);
      std::vector<float> found(5);
      mr_error error = MR_ERROR_INIT;
      const mr_status status = mr_device_read(&queue, found.data(), x.address, x.bytes, x.handle(), &error);
      EXPECT_EQ(status, hangs ? MR_TIMEOUT : MR_INTERNAL) << error.message;
      expect_text(error.message,
                  hangs ? "for the device to finish" : "rank 0: cuMemcpyDtoHAsync on device 0");
      EXPECT_EQ(mr_queue_is_broken(&queue), 1);
      queue.close();
    });
  }
}

/// In one test: what a process knows of its devices stays, and they end with this one.
TEST(CApi, WorksOnDevices) {
  FakeGpu gpu;
  expect_to_work_on_devices(gpu);
  expect_errors_of_devices(gpu);
}

TEST(CApi, RefusesWhatIsWrongWithoutBreaking) {
  struct Case {
    mr_kind kind;
    void (*spoil)(mr_operation&);
    const char* message;
  };
  const Case cases[] = {
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.struct_size = 8; }, "another version"},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.output = nullptr; }, "needs an output"},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.kind = 99; }, "kind of operation 99"},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.kind = MR_ALLREDUCE - 1; },
       "kind of operation 3"},
      {MR_BROADCAST, [](mr_operation& operation) { operation.root = 1; }, "size 1"},
  };
  on_queues(1, [&](mr_queue* queue) {
    Vector x(std::vector<float>(4, 1.0F));
    mr_error error;
    for (const Case& each : cases) {
      mr_operation operation = x.operation(each.kind, "x");
      each.spoil(operation);
      EXPECT_EQ(submit(queue, "x", operation, nullptr, &error), MR_USAGE);
      EXPECT_EQ(error.status, MR_USAGE);
      expect_text(error.message, each.message);
    }
    EXPECT_EQ(submit(queue, nullptr, x.operation(MR_ALLREDUCE), nullptr, &error), MR_USAGE);
    mr_submission empty = MR_SUBMISSION_INIT;
    empty.name = "x";
    EXPECT_EQ(mr_queue_submit(queue, &empty, &error), MR_USAGE);
    empty.struct_size = 8;
    EXPECT_EQ(mr_queue_submit(queue, &empty, &error), MR_USAGE);
    Told told;
    EXPECT_EQ(submit(queue, "x", x.operation(MR_ALLREDUCE), &told), MR_OK);
    EXPECT_EQ(told.await(1).status, MR_OK);
  });
}

TEST(CApi, ErrorsKeepTheirFieldsUnderANumber) {
  on_queues(2, [](mr_queue* queue) {
    const int rank = mr_queue_rank(queue);
    Vector x(std::vector<float>(static_cast<std::size_t>(4 + rank), 1.0F));
    const mr_operation sum = x.operation(MR_ALLREDUCE);
    Told told;
    EXPECT_EQ(mr_queue_is_broken(queue), 0);
    ASSERT_EQ(submit(queue, "weights", sum, &told), MR_OK);
    mr_error first = told.await(1), error;
    EXPECT_NE(mr_queue_is_broken(queue), 0);
    expect_text(first.message, "allreduce 'weights' sum float32[5]");
    EXPECT_EQ(text_of(first), "multiring error " + std::to_string(first.number) +
                                  ": MismatchError: " + std::string(first.message));
    const auto kept = queue->kept(first.number);
    ASSERT_TRUE(kept);
    EXPECT_STREQ(kept->what(), first.message);
    for (const int found : {first.rank, kept->context().rank}) EXPECT_EQ(found, rank);
    for (const int found : {first.peer, kept->context().peer}) EXPECT_EQ(found, 1 - rank);
    for (const std::string& found : {std::string(first.tensor), kept->context().tensor})
      EXPECT_EQ(found, "weights");
    EXPECT_STREQ(first.operation, "allreduce");
    EXPECT_EQ(first.host, queue->host());
    EXPECT_EQ(first.bytes, static_cast<int64_t>(x.values.size() * sizeof(float)));
    for (const char* name : {"next", "more"}) {  // the same error again
      EXPECT_EQ(submit(queue, name, sum, &told, &error), MR_MISMATCH);
      EXPECT_EQ(error.number, first.number);
    }
    EXPECT_EQ(told.errors.size(), 1U);
    for (int i = 0; i < 20;
         ++i) {  // what a caller has found: with what the queue knows; the last few are kept
      mr_error own = MR_ERROR_INIT;
      own.status = MR_USAGE;
      mr_error_set_message(&own, std::to_string(i).c_str());
      mr_queue_keep(queue, &own, nullptr);
      EXPECT_EQ(queue->kept(own.number)->context().rank, rank);
      EXPECT_EQ(queue->kept(own.number)->context().host, queue->host());
    }
    EXPECT_FALSE(queue->kept(first.number));
  });
}

// Python and TensorFlow decode strictly.
TEST(CApi, CutsTextsBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 1500; ++i) text += "\u00e4";  // two bytes
  for (const std::string& begin : {std::string(), std::string("x")})
    on_queues(1, [&](mr_queue* queue) {
      Vector x(std::vector<float>(4, 1.0F));
      mr_error error;
      mr_queue_abort(queue, (begin + text).c_str());
      EXPECT_EQ(submit(queue, "x", x.operation(MR_ALLREDUCE), nullptr, &error), MR_ABORTED);
      EXPECT_TRUE(std::string(error.message).ends_with("\u00e4"));
      EXPECT_EQ(queue->kept(error.number)->what(), begin + text);
    });
}

TEST(CApi, AnAbortReachesAllRanksAndAClosedQueueIsRefused) {
  on_queues(2, [](mr_queue* queue) {
    Vector x(std::vector<float>(4, 1.0F));
    const mr_operation sum = x.operation(MR_ALLREDUCE);
    Told told;
    ASSERT_EQ(submit(queue, mr_queue_rank(queue) == 0 ? "a" : "b", sum, &told), MR_OK);
    if (mr_queue_rank(queue) == 1) mr_queue_abort(queue, "enough");
    const mr_error ended = told.await(1);
    EXPECT_EQ(ended.status, MR_ABORTED);
    expect_text(ended.message, "enough");
    queue->close();
    mr_error error;
    EXPECT_EQ(submit(queue, "c", sum, &told, &error), MR_ABORTED);
    expect_text(error.message, " is closed on rank ");
    EXPECT_NE(mr_queue_is_broken(queue), 0);
    EXPECT_EQ(mr_queue_size(queue), 2);
  });
}

}  // namespace
