// The C ABI, used as a C program would: a store by callbacks, ranks as threads of this process.

#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "multiring.h"
#include "support/errors.h"
#include "transport/store.h"

namespace {

using multiring::InprocStore;
using namespace multiring::testing;

mr_store callbacks(InprocStore& store) {
  mr_store made;
  made.context = &store;
  made.set = [](void* context, const char* key, const char* value, size_t length) {
    static_cast<InprocStore*>(context)->set(key, std::string(value, length), {});
    return 0;
  };
  made.get = [](void* context, const char* key, double seconds, char* value, size_t capacity,
                size_t* length) {
    try {
      const std::string found = static_cast<InprocStore*>(context)->get(key, seconds, {});
      if (found.size() > capacity) return 2;
      std::memcpy(value, found.data(), found.size());
      *length = found.size();
      return 0;
    } catch (const multiring::Error&) {
      return 1;
    }
  };
  return made;
}

/// Runs `body` on `size` ranks, each with a world of its own.
void on_ranks(int size, const std::function<void(mr_communicator*)>& body) {
  InprocStore store;
  in_threads(size, [&](int rank) {
    const mr_store rendezvous = callbacks(store);
    mr_world_options options = MR_WORLD_OPTIONS_INIT;
    options.rank = rank;
    options.size = size;
    options.timeout = 60.0;
    mr_communicator* world = nullptr;
    mr_error error;
    ASSERT_EQ(mr_world_create(&rendezvous, &options, &world, &error), MR_OK) << error.message;
    EXPECT_EQ(mr_rank(world), rank);
    EXPECT_EQ(mr_size(world), size);
    body(world);
    mr_communicator_free(world);
  });
}

/// Runs an operation that succeeds.
void run(mr_communicator* world, const mr_operation& operation, mr_work** result = nullptr) {
  mr_error error;
  ASSERT_EQ(mr_run(world, &operation, -1.0, result, &error), MR_OK) << error.message;
}

/// Runs one that fails; its message.
std::string message_of(mr_status status, mr_communicator* world, const mr_operation& operation) {
  mr_error error;
  EXPECT_EQ(mr_run(world, &operation, -1.0, nullptr, &error), status);
  EXPECT_EQ(error.status, status);
  EXPECT_EQ(error.rank, status == MR_USAGE ? -1 : mr_rank(world));
  return error.message;
}

struct Vector {
  std::vector<float> values;
  std::uint64_t extent;
  explicit Vector(std::vector<float> filled) : values(std::move(filled)), extent(values.size()) {}

  mr_operation operation(mr_kind kind, const char* name) {
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

TEST(CApi, VersionIsThatOfTheBuild) { EXPECT_STREQ(mr_version(), "0.1.0"); }

TEST(CApi, RunsAnAllreduceInPlace) {
  on_ranks(3, [](mr_communicator* world) {
    Vector x(std::vector<float>(1001, static_cast<float>(mr_rank(world) + 1)));
    run(world, x.operation(MR_ALLREDUCE, "x"));
    EXPECT_EQ(x.values, std::vector<float>(1001, 6.0F));
  });
}

TEST(CApi, AllocatesTheResultOfAnUnevenAllgather) {
  on_ranks(3, [](mr_communicator* world) {
    const auto rank = static_cast<std::size_t>(mr_rank(world));
    Vector x(std::vector<float>(rank, static_cast<float>(rank)));
    mr_operation gather = x.operation(MR_ALLGATHER, "x");
    gather.output = nullptr;
    mr_work* result = nullptr;
    run(world, gather, &result);
    size_t bytes = 0;
    uint64_t rows[3] = {};
    const auto* joined = static_cast<const float*>(mr_work_result(result, &bytes, rows));
    ASSERT_EQ(bytes, 3 * sizeof(float));
    EXPECT_EQ(std::vector<float>(joined, joined + 3), (std::vector<float>{1, 2, 2}));
    EXPECT_EQ(std::vector<uint64_t>(rows, rows + 3), (std::vector<uint64_t>{0, 1, 2}));
    mr_work_free(result);
  });
}

TEST(CApi, SubmitsManyAndWaitsForEach) {
  on_ranks(2, [](mr_communicator* world) {
    std::vector<Vector> vectors(20, Vector(std::vector<float>(17, 1.0F)));
    std::vector<mr_work*> works(vectors.size());
    for (std::size_t i = 0; i < vectors.size(); ++i) {
      const mr_operation sum = vectors[i].operation(MR_ALLREDUCE, "x");
      ASSERT_EQ(mr_submit(world, &sum, &works[i], nullptr), MR_OK);
    }
    for (std::size_t i = 0; i < vectors.size(); ++i) {
      mr_error error;
      ASSERT_EQ(mr_work_wait(works[i], 60.0, &error), MR_OK) << error.message;
      EXPECT_EQ(mr_work_done(works[i]), 1);
      EXPECT_EQ(vectors[i].values[16], 2.0F);
      mr_work_free(works[i]);
    }
  });
}

TEST(CApi, SplitsAndReducesSymmetricMemory) {
  on_ranks(3, [](mr_communicator* world) {
    mr_communicator* group = nullptr;
    ASSERT_EQ(mr_split(world, mr_rank(world) == 1 ? -1 : 0, 0, &group, nullptr), MR_OK);
    ASSERT_EQ(group == nullptr, mr_rank(world) == 1);
    if (group == nullptr) return;
    constexpr std::uint64_t kCount = 100000;
    mr_memory* memory = nullptr;
    ASSERT_EQ(mr_symmetric_alloc(group, kCount * sizeof(float), &memory, nullptr), MR_OK);
    auto* values = static_cast<float*>(mr_memory_data(memory));
    std::fill_n(values, kCount, 2.0F);
    mr_operation sum = MR_OPERATION_INIT;
    sum.input = sum.output = values;
    sum.output_bytes = kCount * sizeof(float);
    sum.dims = 1;
    sum.shape = &kCount;
    run(group, sum);
    EXPECT_EQ(values[kCount - 1], 4.0F);
    mr_memory_free(memory);
    mr_communicator_free(group);
  });
}

TEST(CApi, SendsAndReceives) {
  on_ranks(2, [](mr_communicator* world) {
    Vector x(std::vector<float>(5, static_cast<float>(mr_rank(world))));
    mr_operation message = x.operation(mr_rank(world) == 0 ? MR_SEND : MR_RECV, nullptr);
    message.root = 1 - mr_rank(world);
    message.tag = 7;
    run(world, message);
    EXPECT_EQ(x.values, std::vector<float>(5, 0.0F));
  });
}

TEST(CApi, ReportsAMismatchOnEveryRank) {
  on_ranks(2, [](mr_communicator* world) {
    Vector x(std::vector<float>(static_cast<std::size_t>(4 + mr_rank(world)), 1.0F));
    const mr_operation sum = x.operation(MR_ALLREDUCE, "x");
    expect_text(message_of(MR_MISMATCH, world, sum), "float32[5]");
    EXPECT_EQ(mr_run(world, &sum, -1.0, nullptr, nullptr), MR_ABORTED);
  });
}

// Python and TensorFlow decode strictly.
TEST(CApi, CutsTextsBetweenCharacters) {
  std::string text;
  for (int i = 0; i < 1500; ++i) text += "\u00e4";  // two bytes
  for (const std::string& begin : {std::string(), std::string("x")})
    on_ranks(1, [&](mr_communicator* world) {
      Vector x(std::vector<float>(4, 1.0F));
      const std::string name = begin + text;
      mr_operation operation = x.operation(MR_BROADCAST, name.c_str());
      operation.root = 1;
      expect_text(message_of(MR_USAGE, world, operation), "\u00e4' root 1");
      mr_abort(world, name.c_str());
      EXPECT_TRUE(message_of(MR_ABORTED, world, x.operation(MR_ALLREDUCE, "x")).ends_with("\u00e4"));
    });
}

TEST(CApi, RefusesWhatIsWrongWithoutBreaking) {
  struct Case {
    mr_kind kind;
    void (*spoil)(mr_operation&);
    const char* message;
  };
  const Case cases[] = {
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.struct_size = 8; }, ""},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.output = nullptr; }, ""},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.kind = 99; }, ""},
      {MR_ALLREDUCE, [](mr_operation& operation) { operation.comm_dtype = 9; }, "unknown comm_dtype 9"},
      {MR_BROADCAST, [](mr_operation& operation) { operation.comm_dtype = MR_COMM_DTYPE_FLOAT16; }, ""},
      {MR_BROADCAST, [](mr_operation& operation) { operation.root = 1; }, "size 1"},
  };
  on_ranks(1, [&](mr_communicator* world) {
    Vector x(std::vector<float>(4, 1.0F));
    for (const Case& each : cases) {
      mr_operation operation = x.operation(each.kind, "x");
      each.spoil(operation);
      expect_text(message_of(MR_USAGE, world, operation), each.message);
    }
    run(world, x.operation(MR_ALLREDUCE, "x"));
  });
}

/// What `done` was told.
struct Told {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::vector<mr_status> statuses;
  std::vector<std::string> messages;

  static void done(void* context, mr_status status, const mr_error* error, mr_work* const*) {
    auto* told = static_cast<Told*>(context);
    const std::lock_guard lock(told->mutex);
    told->statuses.push_back(status);
    told->messages.emplace_back(error != nullptr ? error->message : "");
    told->changed.notify_all();
  }
  mr_status await(std::size_t count) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return statuses.size() >= count; });
    return statuses[count - 1];
  }
};

mr_queue* queue_over(mr_communicator* world) {
  mr_queue* queue = nullptr;
  mr_error error;
  EXPECT_EQ(mr_queue_create(world, &queue, &error), MR_OK) << error.message;
  return queue;
}

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

TEST(CApi, QueuesMatchByName) {
  on_ranks(3, [](mr_communicator* world) {
    mr_queue* queue = queue_over(world);
    EXPECT_EQ(mr_queue_rank(queue), mr_rank(world));
    EXPECT_EQ(mr_queue_size(queue), 3);
    const char* names[] = {"a", "b", "c"};
    std::vector<Vector> vectors;
    for (int i = 0; i < 3; ++i) vectors.emplace_back(std::vector<float>(5, static_cast<float>(i)));
    Told told;
    for (int i = 0; i < 3; ++i) {
      const int mine = (i + mr_rank(world)) % 3;
      const mr_operation sum = vectors[static_cast<std::size_t>(mine)].operation(MR_ALLREDUCE, nullptr);
      ASSERT_EQ(submit(queue, names[mine], sum, &told), MR_OK);
    }
    told.await(3);
    EXPECT_EQ(told.statuses, std::vector<mr_status>(3, MR_OK));
    for (int i = 0; i < 3; ++i)
      EXPECT_EQ(vectors[static_cast<std::size_t>(i)].values,
                std::vector<float>(5, 3.0F * static_cast<float>(i)));
    mr_queue_free(queue);
  });
}

TEST(CApi, QueuesGiveGroupsAndWhatWasAllocated) {
  on_ranks(2, [](mr_communicator* world) {
    mr_queue* queue = queue_over(world);
    Vector x(std::vector<float>(static_cast<std::size_t>(mr_rank(world) + 1), 1.0F));
    Vector y(std::vector<float>(4, 2.0F));
    mr_operation operations[] = {x.operation(MR_ALLGATHER, nullptr), y.operation(MR_ALLREDUCE, "y")};
    operations[0].output = nullptr;
    struct Answer {
      Told told;
      std::vector<float> joined;
      std::vector<uint64_t> rows;
    } answer;
    const mr_done done = [](void* context, mr_status status, const mr_error* error, mr_work* const* works) {
      auto* to = static_cast<Answer*>(context);
      to->rows.resize(2);
      size_t bytes = 0;
      const auto* data = static_cast<const float*>(mr_work_result(works[0], &bytes, to->rows.data()));
      to->joined.assign(data, data + bytes / sizeof(float));
      Told::done(&to->told, status, error, works);
    };
    mr_submission submission = MR_SUBMISSION_INIT;
    submission.name = "group";
    submission.operations = operations;
    submission.count = 2;
    submission.done = done;
    submission.context = &answer;
    ASSERT_EQ(mr_queue_submit(queue, &submission, nullptr), MR_OK);
    EXPECT_EQ(answer.told.await(1), MR_OK);
    EXPECT_EQ(answer.joined, std::vector<float>(3, 1.0F));
    EXPECT_EQ(answer.rows, (std::vector<uint64_t>{1, 2}));
    EXPECT_EQ(y.values, std::vector<float>(4, 4.0F));
    mr_queue_free(queue);
  });
}

TEST(CApi, QueuesReportErrorsToDone) {
  on_ranks(2, [](mr_communicator* world) {
    mr_queue* queue = queue_over(world);
    Vector x(std::vector<float>(static_cast<std::size_t>(4 + mr_rank(world)), 1.0F));
    mr_operation sum = x.operation(MR_ALLREDUCE, nullptr);
    mr_error error;
    mr_submission empty = MR_SUBMISSION_INIT;
    empty.name = "x";
    EXPECT_EQ(mr_queue_submit(queue, &empty, &error), MR_USAGE);
    empty.struct_size = 8;
    EXPECT_EQ(mr_queue_submit(queue, &empty, &error), MR_USAGE);
    EXPECT_EQ(submit(queue, nullptr, sum, nullptr, &error), MR_USAGE);
    sum.kind = MR_SEND;
    EXPECT_EQ(submit(queue, "x", sum, nullptr, &error), MR_USAGE);
    sum = x.operation(MR_ALLREDUCE, nullptr);
    Told told;
    EXPECT_EQ(mr_queue_is_broken(queue), 0);
    ASSERT_EQ(submit(queue, "weights", sum, &told), MR_OK);
    EXPECT_EQ(told.await(1), MR_MISMATCH);
    EXPECT_NE(mr_queue_is_broken(queue), 0);
    expect_text(told.messages[0], "allreduce 'weights' sum float32[5]");
    for (const char* name : {"next", "more"}) {
      EXPECT_EQ(submit(queue, name, sum, &told, &error), MR_MISMATCH);
      expect_text(error.message, "allreduce 'weights'");
    }
    mr_queue_free(queue);
    EXPECT_EQ(told.statuses.size(), 1U);
  });
}

TEST(CApi, AnAbortReachesTheQueues) {
  on_ranks(2, [](mr_communicator* world) {
    mr_queue* queue = queue_over(world);
    Vector x(std::vector<float>(4, 1.0F));
    const mr_operation sum = x.operation(MR_ALLREDUCE, nullptr);
    Told told;
    ASSERT_EQ(submit(queue, mr_rank(world) == 0 ? "a" : "b", sum, &told), MR_OK);
    if (mr_rank(world) == 1) mr_abort(world, "enough");
    EXPECT_EQ(told.await(1), MR_ABORTED);
    expect_text(told.messages[0], "enough");
    mr_queue_free(queue);
  });
}

TEST(CApi, QueuesEndWithTheirCommunicator) {
  on_ranks(2, [](mr_communicator* world) {
    mr_communicator* group = nullptr;
    ASSERT_EQ(mr_split(world, 0, 0, &group, nullptr), MR_OK);
    mr_queue* queue = queue_over(group);
    Vector x(std::vector<float>(4, 1.0F));
    const mr_operation sum = x.operation(MR_ALLREDUCE, nullptr);
    Told told;
    ASSERT_EQ(submit(queue, mr_rank(world) == 0 ? "a" : "b", sum, &told), MR_OK);
    mr_communicator_free(group);
    ASSERT_EQ(told.statuses.size(), 1U);
    EXPECT_TRUE(told.statuses[0] == MR_ABORTED || told.statuses[0] == MR_PEER_LOST) << told.messages[0];
    mr_error error;
    for (int repeat = 0; repeat < 2; ++repeat) {
      EXPECT_EQ(submit(queue, "c", sum, &told, &error), MR_ABORTED);
      expect_text(error.message, " is closed on rank ");
      mr_queue_close(queue);
    }
    EXPECT_EQ(mr_queue_size(queue), 2);
    mr_queue_free(queue);
  });
}

}  // namespace
