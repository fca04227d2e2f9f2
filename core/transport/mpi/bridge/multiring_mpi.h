/* What the core needs from an MPI library, as C functions: between the core, which is built without any MPI,
 * and the one file that is compiled against the user's (multiring build mpi). */
#ifndef MULTIRING_MPI_H
#define MULTIRING_MPI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with everything below. */
#define MULTIRING_MPI_VERSION 1
/* Name of the one exported symbol, a `const struct multiring_mpi`. */
#define MULTIRING_MPI_SYMBOL "multiring_mpi_bridge"

/* A communicator of its own among the ranks. */
struct multiring_mpi_group;

/* An MPI_Request, whichever type that is. */
typedef struct {
  uint64_t value;
} multiring_mpi_request;

struct multiring_mpi_part {
  const void* data;
  size_t bytes;
};

enum multiring_mpi_outcome {
  MULTIRING_MPI_DONE = 0,
  MULTIRING_MPI_TRUNCATED = 1, /* the message was longer than the memory for it */
  MULTIRING_MPI_FAILED = 2
};

struct multiring_mpi_completion {
  int index;    /* of the request that is done */
  int outcome;  /* multiring_mpi_outcome */
  int source;   /* of a receive */
  size_t bytes; /* of a receive */
};

/* Functions return 0, or else put what is wrong into `why`. All but `open` and `finalize` may be called by
 * any thread at any time in between. No message is longer than INT_MAX bytes. */
struct multiring_mpi {
  int version;
  /* Whether all is simulated: `test` has to block then. */
  int simulated;
  /* Initialises MPI unless that is done, and duplicates `communicator` (an MPI_Comm*; null: MPI_COMM_WORLD).
   * Collective. */
  int (*open)(const void* communicator, struct multiring_mpi_group** group, char* why, size_t why_bytes);
  /* Ends MPI if `open` has initialised it. Collective. */
  void (*finalize)(void);
  /* Whether MPI has ended: only this may be called then. */
  int (*finalized)(void);
  int (*rank)(const struct multiring_mpi_group* group);
  int (*size)(const struct multiring_mpi_group* group);
  /* The largest tag of a message. */
  int (*largest_tag)(const struct multiring_mpi_group* group);
  /* Name and version of the library. */
  const char* (*library)(void);
  int (*send)(struct multiring_mpi_group* group, const struct multiring_mpi_part* parts, size_t count,
              int destination, int tag, multiring_mpi_request* request, char* why, size_t why_bytes);
  /* `source` -1: any rank. */
  int (*receive)(struct multiring_mpi_group* group, void* data, size_t bytes, int source, int tag,
                 multiring_mpi_request* request, char* why, size_t why_bytes);
  /* Tests which of the requests are done, or, if `block`, waits until all are. Those become null requests,
   * which may be passed again. */
  int (*test)(multiring_mpi_request* requests, int count, int block, struct multiring_mpi_completion* done,
              int* done_count, char* why, size_t why_bytes);
  /* Gives up a receive, whose request has to be tested until it is done, with a message or without. Does not
   * block. */
  void (*cancel)(multiring_mpi_request* request);
};

#ifdef __cplusplus
}
#endif

#endif
