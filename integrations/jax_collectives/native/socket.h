/* What libmultiring_mpi.so, which JAX loads in the place of an MPI, and libmultiring_jax_collectives.so,
 * which runs the collectives, agree on.
 *
 * The first one needs nothing but libc, since JAX opens it before anything else is loaded. It forwards MPI's
 * functions to a table that the second one fills. */
#ifndef MULTIRING_JAX_COLLECTIVES_SOCKET_H
#define MULTIRING_JAX_COLLECTIVES_SOCKET_H

#include <stddef.h>
#include <stdint.h>

/* Handles of communicators, datatypes, operations and requests. MPItrampoline reads the values of MPI's
 * constants from the library that it loads, so they are ours to choose. */
typedef uintptr_t mr_mpi_handle;

/* The constants that XLA passes to MPI's functions. All others in mpi_names.txt have values that are refused.
 * Values start at 1, because 0 is MPI_SUCCESS and the null handle. */
#define MR_MPI_CONSTANTS(USE) \
  USE(COMM_WORLD, 1)          \
  USE(SUM, 2)                 \
  USE(PROD, 3)                \
  USE(MIN, 4)                 \
  USE(MAX, 5)                 \
  USE(BYTE, 6)                \
  USE(INT8_T, 7)              \
  USE(UINT8_T, 8)             \
  USE(INT16_T, 9)             \
  USE(UINT16_T, 10)           \
  USE(INT32_T, 11)            \
  USE(UINT32_T, 12)           \
  USE(INT64_T, 13)            \
  USE(UINT64_T, 14)           \
  USE(FLOAT, 15)              \
  USE(DOUBLE, 16)             \
  USE(C_COMPLEX, 17)          \
  USE(C_DOUBLE_COMPLEX, 18)

enum {
#define MR_MPI_VALUE(name, value) MR_MPI_##name = value,
  MR_MPI_CONSTANTS(MR_MPI_VALUE)
#undef MR_MPI_VALUE
};

/* The functions with the signatures and the meaning that MPI gives them. */
typedef struct mr_mpi_table {
  int (*comm_rank)(mr_mpi_handle comm, int* rank);
  int (*comm_size)(mr_mpi_handle comm, int* size);
  int (*comm_split)(mr_mpi_handle comm, int color, int key, mr_mpi_handle* made);
  int (*allreduce)(const void* input, void* output, int count, mr_mpi_handle type, mr_mpi_handle op,
                   mr_mpi_handle comm);
  int (*reduce_scatter)(const void* input, void* output, const int* counts, mr_mpi_handle type,
                        mr_mpi_handle op, mr_mpi_handle comm);
  int (*allgather)(const void* input, int count, mr_mpi_handle type, void* output, mr_mpi_handle comm);
  int (*isend)(const void* data, int count, mr_mpi_handle type, int peer, int tag, mr_mpi_handle comm,
               mr_mpi_handle* request);
  int (*irecv)(void* data, int count, mr_mpi_handle type, int peer, int tag, mr_mpi_handle comm,
               mr_mpi_handle* request);
  int (*wait)(mr_mpi_handle* request);
  int (*error_string)(int code, char* text, int* length);
} mr_mpi_table;

#endif /* MULTIRING_JAX_COLLECTIVES_SOCKET_H */
