/* The C ABI of multiring: how native code of the adapters submits operations to a rank's named queue, or runs
 * them on a communicator. Both are made, closed and handed over by address in Python (multiring.NamedQueue,
 * multiring.Communicator).
 *
 * Functions of a queue wait for no other rank, functions of a communicator do; all may be called from any
 * thread. Functions return MR_OK or an error's kind, and describe the error in *error if that is not NULL.
 * Initialise structs with the macros: they record the size that the caller was compiled with, and a library
 * of another version refuses it.
 */
#ifndef MULTIRING_H
#define MULTIRING_H

#include <stddef.h>
#include <stdint.h>

#define MR_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_status {
  MR_OK = 0,
  MR_USAGE = 1,     /* an argument or state is wrong; the communicator still works */
  MR_MISMATCH = 2,  /* the ranks asked for different things */
  MR_TIMEOUT = 3,   /* a rank did not come before the deadline */
  MR_PEER_LOST = 4, /* a rank died or left */
  MR_ABORTED = 5,   /* broken by an earlier error, aborted or closed */
  MR_INTERNAL = 6   /* a defect or a failing system call */
} mr_status;

typedef enum mr_dtype {
  MR_BOOL = 0,
  MR_INT8 = 1,
  MR_UINT8 = 2,
  MR_INT16 = 3,
  MR_UINT16 = 4,
  MR_INT32 = 5,
  MR_UINT32 = 6,
  MR_INT64 = 7,
  MR_UINT64 = 8,
  MR_FLOAT16 = 9,
  MR_BFLOAT16 = 10,
  MR_FLOAT32 = 11,
  MR_FLOAT64 = 12,
  MR_COMPLEX64 = 13, /* pairs of a real and an imaginary part */
  MR_COMPLEX128 = 14
} mr_dtype;

typedef enum mr_reduce_op {
  MR_SUM = 0,
  MR_AVERAGE = 1,
  MR_MIN = 2,
  MR_MAX = 3,
  MR_PRODUCT = 4,
  MR_BITWISE_AND = 5, /* these three: of integers and bool, without scale factors */
  MR_BITWISE_OR = 6,
  MR_BITWISE_XOR = 7
} mr_reduce_op;

typedef enum mr_kind {
  MR_ALLREDUCE = 4,
  MR_REDUCE_SCATTER = 5,
  MR_ALLGATHER = 6,
  MR_BROADCAST = 7,
  MR_ALLTOALL = 8,
  MR_GATHER = 9,
  MR_SCATTER = 10,
  MR_BARRIER = 11
} mr_kind;

/* The result of an operation of a kind. */
typedef enum mr_output {
  MR_OUTPUT_NONE = 0,
  MR_OUTPUT_SAME = 1,  /* has the shape of the input; the caller has to give its memory */
  MR_OUTPUT_BLOCK = 2, /* this rank's share of the rows */
  MR_OUTPUT_JOINED = 3 /* rows of all ranks, known when the operation is done */
} mr_output;

/* What is known of an error: the fields of multiring.MultiringError. */
typedef struct mr_error {
  mr_status status;
  int rank; /* -1: unknown, as all below */
  int peer;
  int64_t bytes;
  double elapsed; /* seconds */
  int64_t number; /* under which the queue keeps the error for Python; 0: it does not */
  char host[256]; /* empty: unknown, as all below */
  char operation[64];
  char tensor[4097];
  char message[2048]; /* cut if longer; what the queue keeps is not */
} mr_error;
#define MR_ERROR_INIT {MR_OK, -1, -1, -1, -1.0, 0, "", "", "", ""}

typedef struct mr_work mr_work;
typedef struct mr_queue mr_queue;
typedef struct mr_communicator mr_communicator;

/* One operation. Arrays are C-contiguous. `shape` is that of the input; axis 0 is split or joined as in the
 * Python functions of the same names.
 *
 * On a device, what the operation reads and writes comes after the work that `stream` has when it is
 * submitted, and is complete when it is done. Until then the stream must be given no work that touches the
 * arrays. */
typedef struct mr_operation {
  size_t struct_size;
  int kind;  /* mr_kind */
  int dtype; /* mr_dtype */
  int op;    /* mr_reduce_op */
  int root;  /* broadcast, gather, scatter; -1 otherwise */
  double prescale;
  double postscale;
  const char* name;    /* NULL: none */
  const void* input;   /* NULL: none (scatter except on the root, barrier) */
  void* output;        /* NULL: allocated, see mr_work_result (not for allreduce, broadcast) */
  size_t output_bytes; /* room at `output` */
  int dims;            /* at most 8 */
  const uint64_t* shape;
  const uint64_t* splits; /* alltoall: rows for each rank; NULL: as equal as possible */
  int on_device;          /* whether `input` and `output` are memory of CUDA devices */
  void* stream;           /* of their device, a CUstream; NULL: the legacy default stream */
} mr_operation;
#define MR_OPERATION_INIT \
  {sizeof(mr_operation),  \
   MR_ALLREDUCE,          \
   MR_FLOAT32,            \
   MR_SUM,                \
   -1,                    \
   1.0,                   \
   1.0,                   \
   NULL,                  \
   NULL,                  \
   NULL,                  \
   0,                     \
   0,                     \
   NULL,                  \
   NULL,                  \
   0,                     \
   NULL}

/* Called exactly once for each accepted submission, on a thread of the queue or inside its close(), never
 * inside mr_queue_submit. `error` is NULL, or tells the first operation that failed, and is valid during the
 * call. Once the queue is broken, each submission fails with the first error itself: a framework reports any
 * of those that fail. works[i] belongs to operations[i] and is valid during the call only (for mr_work_result
 * of what was allocated). It may submit; what it waits for must not need this queue. */
typedef void (*mr_done)(void* context, const mr_error* error, mr_work* const* works);

/* Operations that are queued under one name.
 *
 * A submission is matched with the peers' submission of its name. A name may be submitted again: the k-th
 * submission of a name on one rank meets the k-th on the others, and has to be in the same `step` there: a
 * number that the caller counts up, so that what a failed step has omitted on one rank is MR_MISMATCH and not
 * matched with the next one's. Its upper 32 bits, if there are any, are for what repeats within a step: they
 * are compared as well, and shown where the lower ones agree. What all ranks submit in one order has a
 * `position`, counted from 1 on each rank: another name at the same position on another rank is MR_MISMATCH
 * at once, and not after the timeout. */
typedef struct mr_submission {
  size_t struct_size;
  const char* name;               /* at most 4096 bytes */
  const mr_operation* operations; /* arrays must live, and not be touched, until `done` */
  int count;
  int priority;      /* higher leaves earlier; rank 0's counts */
  uint64_t step;     /* 0: not counted */
  uint64_t position; /* 0: in any order */
  mr_done done;      /* NULL: none */
  void* context;
} mr_submission;
#define MR_SUBMISSION_INIT {sizeof(mr_submission), NULL, NULL, 0, 0, 0, 0, NULL, NULL}

MR_API int mr_queue_rank(const mr_queue* queue);
MR_API int mr_queue_size(const mr_queue* queue);
/* Queues a submission. */
MR_API mr_status mr_queue_submit(mr_queue* queue, const mr_submission* submission, mr_error* error);
/* Whether an error of any rank has broken the queue, or it is closed. */
MR_API int mr_queue_is_broken(const mr_queue* queue);
/* Breaks the queue on all ranks: pending and later submissions fail with MR_ABORTED and this message. */
MR_API void mr_queue_abort(mr_queue* queue, const char* message);
/* Keeps an error that the caller has found, or to whose message it adds `more` (NULL: nothing), as the queue
 * keeps its own: sets the number, and the rank and the host where they are not known. */
MR_API void mr_queue_keep(mr_queue* queue, mr_error* error, const char* more);

MR_API int mr_communicator_rank(const mr_communicator* communicator);
MR_API int mr_communicator_size(const mr_communicator* communicator);
/* Runs a collective in this thread and returns when it is done here. The result is dropped where `output` is
 * NULL. All ranks run the collectives of a communicator in the same order. */
MR_API mr_status mr_communicator_run(mr_communicator* communicator, const mr_operation* operation,
                                     mr_error* error);
/* Sends bytes to a rank as one message with a tag, and receives such a message of as many bytes. Messages
 * from one rank to another arrive in the order in which they were sent. mr_communicator_send may return
 * before the message is received. */
MR_API mr_status mr_communicator_send(mr_communicator* communicator, int peer, int64_t tag, const void* data,
                                      size_t bytes, mr_error* error);
MR_API mr_status mr_communicator_receive(mr_communicator* communicator, int peer, int64_t tag, void* data,
                                         size_t bytes, mr_error* error);

/* Gives a stream, as in mr_operation, a copy on its device, and returns. If the device has failed, the queue
 * breaks on all ranks. */
MR_API mr_status mr_device_copy(mr_queue* queue, void* to, const void* from, size_t bytes, void* stream,
                                mr_error* error);
/* Copies memory of a device to the host when the stream has done the work that it has now, and returns when
 * that is there; MR_TIMEOUT after the queue's timeout. The same if the device has failed. */
MR_API mr_status mr_device_read(mr_queue* queue, void* to, const void* from, size_t bytes, void* stream,
                                mr_error* error);

/* Memory that was allocated for a result, on the device where the input is (the host's, where that is empty),
 * and the rows that came from each rank (`rows`: room for as many numbers as there are ranks, or NULL). */
MR_API const void* mr_work_result(const mr_work* work, size_t* bytes, uint64_t* rows);

/* Cut between two characters if it is too long: frameworks decode strictly. */
MR_API void mr_error_set_message(mr_error* error, const char* message);
/* What a framework is told of an error, "multiring error 17: PeerLostError: ..."; multiring/error_text.py
 * finds the error itself by it. Cut if there is no room. */
MR_API void mr_error_text(const mr_error* error, char* text, size_t room);
/* The code of a status among those of gRPC and absl, which several frameworks use. */
MR_API int mr_status_code(mr_status status);
MR_API mr_output mr_output_of(mr_kind kind);
/* A number that changes with every bit of the memory and its place: what ranks compare of their state. */
MR_API uint64_t mr_checksum(const void* data, size_t bytes, uint64_t seed);

#ifdef __cplusplus
}
#endif

#endif /* MULTIRING_H */
