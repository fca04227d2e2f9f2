/* The C ABI of multiring: what everything but Python uses to reach the engine.
 *
 * Functions return MR_OK or an error's kind, and describe the error in *error if that is not NULL. Objects
 * are opaque; each mr_..._free is called once. Functions are thread-safe as the communicator is: operations
 * issued from several threads of a rank have an order that the peers must share. Initialise structs with the
 * macros: they record the size that the caller was compiled with, and a library of another version refuses
 * it.
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
  MR_FLOAT64 = 12
} mr_dtype;

typedef enum mr_reduce_op { MR_SUM = 0, MR_AVERAGE = 1, MR_MIN = 2, MR_MAX = 3, MR_PRODUCT = 4 } mr_reduce_op;

/* The dtype that an allreduce of float32 sends between hosts. */
typedef enum mr_comm_dtype {
  MR_COMM_DTYPE_DEFAULT = 0,
  MR_COMM_DTYPE_FLOAT32 = 1,
  MR_COMM_DTYPE_FLOAT16 = 2,
  MR_COMM_DTYPE_BFLOAT16 = 3
} mr_comm_dtype;

typedef enum mr_kind {
  MR_ALLREDUCE = 0,
  MR_REDUCE_SCATTER = 1,
  MR_ALLGATHER = 2,
  MR_BROADCAST = 3,
  MR_ALLTOALL = 4,
  MR_GATHER = 5,
  MR_SCATTER = 6,
  MR_BARRIER = 7,
  MR_SEND = 8,
  MR_RECV = 9
} mr_kind;

/* The result of an operation of a kind. */
typedef enum mr_output {
  MR_OUTPUT_NONE = 0,
  MR_OUTPUT_SAME = 1,  /* has the shape of the operation; the caller has to give its memory */
  MR_OUTPUT_BLOCK = 2, /* this rank's share of the rows */
  MR_OUTPUT_JOINED = 3 /* rows of all ranks, known when the operation is done */
} mr_output;

typedef struct mr_error {
  mr_status status;
  int rank; /* -1: unknown */
  int peer; /* -1: unknown */
  char message[2048];
} mr_error;

typedef struct mr_communicator mr_communicator;
typedef struct mr_work mr_work;
typedef struct mr_memory mr_memory;
typedef struct mr_queue mr_queue;

/* Key-value rendezvous given by the caller. Both return 0 on success. `get` waits up to `seconds` for the key
 * and copies at most `capacity` bytes of its value, setting *length; it returns 1 if the key did not come in
 * time. */
typedef struct mr_store {
  void* context;
  int (*set)(void* context, const char* key, const char* value, size_t length);
  int (*get)(void* context, const char* key, double seconds, char* value, size_t capacity, size_t* length);
} mr_store;

typedef struct mr_world_options {
  size_t struct_size;
  int rank;
  int size;
  const char* socket_directory; /* existing, mode 0700; NULL: a temporary one */
  size_t staging_bytes;         /* 0: the default */
  double timeout;               /* seconds; 0: the default */
} mr_world_options;
#define MR_WORLD_OPTIONS_INIT {sizeof(mr_world_options), 0, 1, NULL, 0, 0.0}

/* One operation. Arrays are C-contiguous. `shape` is that of the input (of the expected output for MR_RECV);
 * axis 0 is split or joined as in the Python functions of the same names. */
typedef struct mr_operation {
  size_t struct_size;
  int kind;     /* mr_kind */
  int dtype;    /* mr_dtype */
  int op;       /* mr_reduce_op */
  int root;     /* broadcast, gather, scatter; the peer of send and recv; -1 otherwise */
  int64_t tag;  /* send, recv */
  int priority; /* mr_submit: higher leaves earlier */
  double prescale;
  double postscale;
  const char* name;    /* NULL: none */
  const void* input;   /* NULL: none (scatter except on the root, barrier, recv) */
  void* output;        /* NULL: allocated, see mr_work_result (not for allreduce, broadcast, recv) */
  size_t output_bytes; /* room at `output` */
  int dims;            /* at most 8 */
  const uint64_t* shape;
  const uint64_t* splits; /* alltoall: rows for each rank; NULL: as equal as possible */
  int comm_dtype;         /* mr_comm_dtype; MR_COMM_DTYPE_DEFAULT: what MULTIRING_COMM_DTYPE says */
} mr_operation;
#define MR_OPERATION_INIT \
  {sizeof(mr_operation),  \
   MR_ALLREDUCE,          \
   MR_FLOAT32,            \
   MR_SUM,                \
   -1,                    \
   0,                     \
   0,                     \
   1.0,                   \
   1.0,                   \
   NULL,                  \
   NULL,                  \
   NULL,                  \
   0,                     \
   0,                     \
   NULL,                  \
   NULL,                  \
   MR_COMM_DTYPE_DEFAULT}

/* Version of the library, "0.1.0". */
MR_API const char* mr_version(void);
/* Name of the exception that Python raises: "MismatchError"; "InternalError" for what is no status. */
MR_API const char* mr_status_name(mr_status status);
/* The code of a status among those of gRPC and absl, which several frameworks use. */
MR_API int mr_status_code(mr_status status);
MR_API mr_output mr_output_of(mr_kind kind);
/* A number that changes with every bit of the memory and its place: what ranks compare of their state. */
MR_API uint64_t mr_checksum(const void* data, size_t bytes, uint64_t seed);

/* Joins the ranks of one host through shared memory. Collective. */
MR_API mr_status mr_world_create(const mr_store* store, const mr_world_options* options,
                                 mr_communicator** world, mr_error* error);
MR_API int mr_rank(const mr_communicator* communicator);
MR_API int mr_size(const mr_communicator* communicator);
/* Splits into groups of equal color, ranked by key. Collective. *child is NULL for a negative color. */
MR_API mr_status mr_split(mr_communicator* communicator, int64_t color, int64_t key, mr_communicator** child,
                          mr_error* error);
/* Breaks the communicator and its queues on all ranks. */
MR_API void mr_abort(mr_communicator* communicator, const char* message);
/* Leaves the group and frees this rank's handle; memory and finished work taken from it stay valid. */
MR_API void mr_communicator_free(mr_communicator* communicator);

/* Runs an operation in this thread; `timeout` in seconds, negative for the communicator's. MR_SEND and
 * MR_RECV run only this way. If `result` is not NULL, *result gets a handle to what was allocated (free it).
 */
MR_API mr_status mr_run(mr_communicator* communicator, const mr_operation* operation, double timeout,
                        mr_work** result, mr_error* error);
/* Queues an operation. The arrays must live, and not be touched, until it is done. */
MR_API mr_status mr_submit(mr_communicator* communicator, const mr_operation* operation, mr_work** work,
                           mr_error* error);
MR_API int mr_work_done(const mr_work* work);
/* Waits and reports the operation's error; MR_TIMEOUT after `timeout` seconds (negative: none), the work goes
 * on. */
MR_API mr_status mr_work_wait(mr_work* work, double timeout, mr_error* error);
/* Of done work: memory that was allocated for the result, valid until the work is freed, and the rows that
 * came from each rank (`rows` has room for mr_size numbers, or is NULL). */
MR_API const void* mr_work_result(const mr_work* work, size_t* bytes, uint64_t* rows);
/* Frees the handle; an operation not yet done continues. */
MR_API void mr_work_free(mr_work* work);

/* Memory that all ranks have mapped. Collective, with the same `bytes` on all ranks. */
MR_API mr_status mr_symmetric_alloc(mr_communicator* communicator, size_t bytes, mr_memory** memory,
                                    mr_error* error);
MR_API void* mr_memory_data(const mr_memory* memory);
MR_API void mr_memory_free(mr_memory* memory);

/* Operations matched by name: ranks may submit them in any order, several in flight, from any thread.
 *
 * Called exactly once for each accepted submission, on a thread of the queue or inside mr_queue_close, never
 * inside mr_queue_submit: MR_OK, or the status of the first operation that failed. `error` is NULL, or valid
 * during the call. Once the queue is broken, each submission with a `done` fails with the first error itself:
 * a framework reports any of those that fail. works[i] belongs to operations[i] and is valid during the call
 * only (for mr_work_result of what was allocated). It may submit; what it waits for must not need this queue.
 */
typedef void (*mr_done)(void* context, mr_status status, const mr_error* error, mr_work* const* works);
/* Collective over the communicator. The queue has communicators of its own, so that it never gets between the
 * communicator's other operations. It ends with the communicator. */
MR_API mr_status mr_queue_create(mr_communicator* communicator, mr_queue** queue, mr_error* error);
MR_API int mr_queue_rank(const mr_queue* queue);
MR_API int mr_queue_size(const mr_queue* queue);
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
  const mr_operation* operations; /* not send and recv; arrays must live, and not be touched, until `done` */
  int count;
  int priority;      /* higher leaves earlier; rank 0's counts */
  uint64_t step;     /* 0: not counted */
  uint64_t position; /* 0: in any order */
  mr_done done;      /* NULL: none */
  void* context;
} mr_submission;
#define MR_SUBMISSION_INIT {sizeof(mr_submission), NULL, NULL, 0, 0, 0, 0, NULL, NULL}
/* Queues a submission. Never waits for another rank. */
MR_API mr_status mr_queue_submit(mr_queue* queue, const mr_submission* submission, mr_error* error);
/* Whether an error of any rank has broken the queue, or it is closed. */
MR_API int mr_queue_is_broken(const mr_queue* queue);
/* Breaks the queue on all ranks: pending and later submissions fail with MR_ABORTED and this message. */
MR_API void mr_queue_abort(mr_queue* queue, const char* message);
/* Ends this rank's part: pending submissions fail (done is called), later ones are refused with MR_ABORTED.
 * On a thread of the queue, as inside `done`, it only begins the end. */
MR_API void mr_queue_close(mr_queue* queue);
/* Closes, and frees the handle. */
MR_API void mr_queue_free(mr_queue* queue);

#ifdef __cplusplus
}
#endif

#endif /* MULTIRING_H */
