// Threads of Gloo sleep after they have told that an operation is done, as under load: SWITCHYARD_LATE_GLOO_US
// microseconds. To be loaded before other libraries.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

int pthread_cond_broadcast(pthread_cond_t* condition) {
  typedef int (*Broadcast)(pthread_cond_t*);
  static Broadcast broadcast;
  if (broadcast == NULL) {
    // An unversioned look-up may find the function for conditions of glibc before 2.3.2.
    void* found = dlvsym(RTLD_NEXT, "pthread_cond_broadcast", "GLIBC_2.3.2");
    if (found == NULL) found = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    broadcast = (Broadcast)found;
  }
  const int result = broadcast(condition);
  char name[16] = "";
  prctl(PR_GET_NAME, name);
  const char* const late = getenv("SWITCHYARD_LATE_GLOO_US");
  if (late != NULL && strcmp(name, "pt_gloo_runloop") == 0) usleep((useconds_t)atoi(late));
  return result;
}
