/* The one function of the NVIDIA driver that shmsync calls directly. It makes the call on a separate thread, as the
   driver does, and waits for its end: a caller with the GIL held finds out whether the function wants it. */
#include <pthread.h>

struct call {
  void (*function)(void *);
  void *data;
};

static void *run(void *given) {
  struct call *call = given;
  call->function(call->data);
  return 0;
}

int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  struct call call = {function, data};
  pthread_t thread;
  if (stream == 0) return 400; /* CUDA_ERROR_INVALID_HANDLE */
  if (pthread_create(&thread, 0, run, &call)) return 2;
  pthread_join(thread, 0);
  return 0;
}
