/* Compiled against an MPI library by `multiring build mpi`; needs MPI 3.0. See multiring_mpi.h. */

#include "multiring_mpi.h"

#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct multiring_mpi_group {
  MPI_Comm communicator;
  int rank;
  int size;
  int largest_tag;
};

_Static_assert(sizeof(MPI_Request) <= sizeof(multiring_mpi_request), "a request has to fit");

static int initialized_here;

static int fail(int code, const char* call, char* why, size_t why_bytes) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) snprintf(text, sizeof text, "error %d", code);
  snprintf(why, why_bytes, "%s: %s", call, text);
  return 1;
}

static MPI_Request from_handle(const multiring_mpi_request* handle) {
  MPI_Request request;
  memcpy(&request, handle, sizeof request);
  return request;
}

static void to_handle(MPI_Request request, multiring_mpi_request* handle) {
  handle->value = 0;
  memcpy(handle, &request, sizeof request);
}

static int start_mpi(char* why, size_t why_bytes) {
  int done = 0, provided = MPI_THREAD_SINGLE;
  MPI_Finalized(&done);
  if (done) {
    snprintf(why, why_bytes, "MPI has been finalized in this process and cannot start again");
    return 1;
  }
  MPI_Initialized(&done);
  if (done) {
    MPI_Query_thread(&provided);
  } else {
    const int code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    if (code != MPI_SUCCESS) return fail(code, "MPI_Init_thread", why, why_bytes);
    initialized_here = 1;
    /* Errors of calls that belong to no communicator end the process otherwise. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  }
#ifndef MULTIRING_MPI_SIMULATED
  if (provided < MPI_THREAD_MULTIPLE) {
    snprintf(why, why_bytes,
             "MPI was initialised for thread level %d, and MPI_THREAD_MULTIPLE (%d) is needed: multiring and "
             "the program call it from threads of their own",
             provided, MPI_THREAD_MULTIPLE);
    return 1;
  }
#endif
  return 0;
}

static int bridge_open(const void* communicator, struct multiring_mpi_group** group, char* why,
                       size_t why_bytes) {
  if (start_mpi(why, why_bytes) != 0) return 1;
  const MPI_Comm parent = communicator == NULL ? MPI_COMM_WORLD : *(const MPI_Comm*)communicator;
  struct multiring_mpi_group* made = calloc(1, sizeof *made);
  if (made == NULL) {
    snprintf(why, why_bytes, "out of memory");
    return 1;
  }
  int code = MPI_Comm_dup(parent, &made->communicator);
  if (code == MPI_SUCCESS) code = MPI_Comm_set_errhandler(made->communicator, MPI_ERRORS_RETURN);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(made->communicator, &made->rank);
  if (code == MPI_SUCCESS) code = MPI_Comm_size(made->communicator, &made->size);
  if (code != MPI_SUCCESS) {
    free(made);
    return fail(code, "MPI_Comm_dup", why, why_bytes);
  }
  int* bound = NULL;
  int found = 0;
  MPI_Comm_get_attr(made->communicator, MPI_TAG_UB, &bound, &found);
  made->largest_tag = found ? *bound : 32767;
  *group = made;
  return 0;
}

static void bridge_finalize(void) {
  int done = 0;
  MPI_Finalized(&done);
  if (initialized_here && !done) MPI_Finalize();
}

static int bridge_finalized(void) {
  int done = 0;
  MPI_Finalized(&done);
  return done;
}

static int bridge_rank(const struct multiring_mpi_group* group) { return group->rank; }
static int bridge_size(const struct multiring_mpi_group* group) { return group->size; }
static int bridge_largest_tag(const struct multiring_mpi_group* group) { return group->largest_tag; }

static const char* bridge_library(void) {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  return text;
}

/* One run of bytes that lies in several places: absolute addresses, so that MPI gathers them itself. */
static int send_parts(struct multiring_mpi_group* group, const struct multiring_mpi_part* parts, size_t count,
                      int destination, int tag, MPI_Request* request) {
  int* lengths = malloc(count * sizeof *lengths);
  MPI_Aint* places = malloc(count * sizeof *places);
  MPI_Datatype type = MPI_DATATYPE_NULL;
  int code = lengths != NULL && places != NULL ? MPI_SUCCESS : MPI_ERR_NO_MEM;
  if (code == MPI_SUCCESS) {
    for (size_t index = 0; index < count; ++index) {
      lengths[index] = (int)parts[index].bytes;
      MPI_Get_address(parts[index].data, &places[index]);
    }
    code = MPI_Type_create_hindexed((int)count, lengths, places, MPI_BYTE, &type);
  }
  if (code == MPI_SUCCESS) code = MPI_Type_commit(&type);
  if (code == MPI_SUCCESS)
    code = MPI_Isend(MPI_BOTTOM, 1, type, destination, tag, group->communicator, request);
  if (type != MPI_DATATYPE_NULL) MPI_Type_free(&type);
  free(lengths);
  free(places);
  return code;
}

static int bridge_send(struct multiring_mpi_group* group, const struct multiring_mpi_part* parts,
                       size_t count, int destination, int tag, multiring_mpi_request* handle, char* why,
                       size_t why_bytes) {
  MPI_Request request = MPI_REQUEST_NULL;
  int code;
  if (count > 1)
    code = send_parts(group, parts, count, destination, tag, &request);
  else
    code = MPI_Isend(count == 0 ? NULL : parts[0].data, count == 0 ? 0 : (int)parts[0].bytes, MPI_BYTE,
                     destination, tag, group->communicator, &request);
  if (code != MPI_SUCCESS) return fail(code, "MPI_Isend", why, why_bytes);
  to_handle(request, handle);
  return 0;
}

static int bridge_receive(struct multiring_mpi_group* group, void* data, size_t bytes, int source, int tag,
                          multiring_mpi_request* handle, char* why, size_t why_bytes) {
  MPI_Request request = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(data, (int)bytes, MPI_BYTE, source < 0 ? MPI_ANY_SOURCE : source, tag,
                             group->communicator, &request);
  if (code != MPI_SUCCESS) return fail(code, "MPI_Irecv", why, why_bytes);
  to_handle(request, handle);
  return 0;
}

static int outcome_of(int code) {
  int kind = MPI_SUCCESS;
  if (code == MPI_SUCCESS) return MULTIRING_MPI_DONE;
  MPI_Error_class(code, &kind);
  return kind == MPI_ERR_TRUNCATE ? MULTIRING_MPI_TRUNCATED : MULTIRING_MPI_FAILED;
}

struct scratch {
  MPI_Request* requests;
  MPI_Status* statuses;
  int* indices;
};

static void complete(const MPI_Status* status, int outcome, int index,
                     struct multiring_mpi_completion* done) {
  int bytes = 0;
  done->index = index;
  done->outcome = outcome;
  done->source = status->MPI_SOURCE;
  if (outcome == MULTIRING_MPI_DONE) MPI_Get_count(status, MPI_BYTE, &bytes);
  done->bytes = bytes == MPI_UNDEFINED ? 0 : (size_t)bytes;
}

/* One after the other: errors go to the communicator of the request. */
static void test_each(multiring_mpi_request* handles, int count, int block,
                      struct multiring_mpi_completion* done, int* done_count) {
  for (int index = 0; index < count; ++index) {
    MPI_Request request = from_handle(&handles[index]);
    MPI_Status status;
    int flag = 1;
    if (request == MPI_REQUEST_NULL) continue;
    const int code = block ? MPI_Wait(&request, &status) : MPI_Test(&request, &flag, &status);
    to_handle(request, &handles[index]);
    if (code == MPI_SUCCESS && !flag) continue;
    complete(&status, outcome_of(code), index, &done[(*done_count)++]);
    if (code != MPI_SUCCESS) to_handle(MPI_REQUEST_NULL, &handles[index]);
  }
}

static int test_some(struct scratch* scratch, multiring_mpi_request* handles, int count,
                     struct multiring_mpi_completion* done, int* done_count, char* why, size_t why_bytes) {
  int found = 0;
  for (int index = 0; index < count; ++index) scratch->requests[index] = from_handle(&handles[index]);
  const int code = MPI_Testsome(count, scratch->requests, &found, scratch->indices, scratch->statuses);
  for (int index = 0; index < count; ++index) to_handle(scratch->requests[index], &handles[index]);
  int kind = MPI_SUCCESS;
  if (code != MPI_SUCCESS) MPI_Error_class(code, &kind);
  if (code != MPI_SUCCESS && kind != MPI_ERR_IN_STATUS) return fail(code, "MPI_Testsome", why, why_bytes);
  *done_count = found == MPI_UNDEFINED ? 0 : found;
  for (int place = 0; place < *done_count; ++place) {
    const MPI_Status* const status = &scratch->statuses[place];
    const int outcome = code == MPI_SUCCESS ? MULTIRING_MPI_DONE : outcome_of(status->MPI_ERROR);
    complete(status, outcome, scratch->indices[place], &done[place]);
  }
  return 0;
}

static int bridge_test(multiring_mpi_request* handles, int count, int block,
                       struct multiring_mpi_completion* done, int* done_count, char* why, size_t why_bytes) {
  enum { kUsual = 64 };
  MPI_Request requests[kUsual];
  MPI_Status statuses[kUsual];
  int indices[kUsual];
  struct scratch scratch = {requests, statuses, indices};
  *done_count = 0;
  if (block || !initialized_here) {
    test_each(handles, count, block, done, done_count);
    return 0;
  }
  if (count <= kUsual) return test_some(&scratch, handles, count, done, done_count, why, why_bytes);
  const size_t many = (size_t)count;
  scratch.requests = malloc(many * sizeof *requests);
  scratch.statuses = malloc(many * sizeof *statuses);
  scratch.indices = malloc(many * sizeof *indices);
  int code = 1;
  if (scratch.requests != NULL && scratch.statuses != NULL && scratch.indices != NULL)
    code = test_some(&scratch, handles, count, done, done_count, why, why_bytes);
  else
    snprintf(why, why_bytes, "out of memory for %d messages", count);
  free(scratch.requests);
  free(scratch.statuses);
  free(scratch.indices);
  return code;
}

static void bridge_cancel(multiring_mpi_request* handle) {
  MPI_Request request = from_handle(handle);
  if (request != MPI_REQUEST_NULL) MPI_Cancel(&request);
}

__attribute__((visibility("default"))) const struct multiring_mpi multiring_mpi_bridge = {
    MULTIRING_MPI_VERSION,
#ifdef MULTIRING_MPI_SIMULATED
    1,
#else
    0,
#endif
    bridge_open,
    bridge_finalize,
    bridge_finalized,
    bridge_rank,
    bridge_size,
    bridge_largest_tag,
    bridge_library,
    bridge_send,
    bridge_receive,
    bridge_test,
    bridge_cancel,
};
