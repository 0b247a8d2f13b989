/* A library for LD_PRELOAD: storage that is full, read-only or slow, and a clock that jumps.
 *
 * FAULT names the fault, and FAULT_UNDER the folder whose files have it. The fault lasts while the
 * file FAULT_ON exists. The tests compile this file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is(const char *fault) {
  const char *asked = getenv("FAULT"), *on = getenv("FAULT_ON");
  return asked && on && !strcmp(asked, fault) && !access(on, F_OK);
}

static int is_under(const char *path) {
  const char *folder = getenv("FAULT_UNDER");
  return folder && path && !strncmp(path, folder, strlen(folder));
}

static int is_of(int fd) {
  char name[64], path[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(name, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_under(path);
}

/* The error for a write: 0 for none. */
static int refused(int ours) {
  if (!ours) return 0;
  if (is("full")) return ENOSPC;
  if (is("read-only")) return EROFS;
  if (is("slow")) usleep(20000 + rand() % 60000);
  return 0;
}

#define GUARD(ours)                 \
  do {                              \
    int error = refused(ours);      \
    if (error) return errno = error, -1; \
  } while (0)

#define OPEN(name)                                                       \
  int name(const char *path, int flags, ...) {                           \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                        \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) GUARD(is_under(path));     \
    return REAL(name)(path, flags, mode);                                \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                     \
  int name(int folder, const char *path, int flags, ...) {               \
    va_list rest;                                                        \
    va_start(rest, flags);                                               \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest);                                                        \
    if (flags & (O_WRONLY | O_RDWR | O_CREAT))                            \
      GUARD(is_under(path) || (folder >= 0 && is_of(folder)));           \
    return REAL(name)(folder, path, flags, mode);                        \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t n) {
  GUARD(is_of(fd));
  return REAL(write)(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  GUARD(is_of(fd));
  return REAL(pwrite)(fd, data, n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  GUARD(is_of(fd));
  return REAL(pwrite64)(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
  GUARD(is_of(fd));
  return REAL(writev)(fd, parts, n);
}
int fsync(int fd) {
  GUARD(is_of(fd));
  return REAL(fsync)(fd);
}
int mkdir(const char *path, mode_t mode) {
  GUARD(is_under(path));
  return REAL(mkdir)(path, mode);
}
int rename(const char *from, const char *to) {
  GUARD(is_under(to));
  return REAL(rename)(from, to);
}
int unlink(const char *path) {
  if (is("read-only")) GUARD(is_under(path));  /* a full disk lets one delete */
  return REAL(unlink)(path);
}

/* The system clock jumps by up to a day, forwards and backwards, every few milliseconds.
 * For Python only: C++ hands the time at which to wake up to the kernel, whose clock does not jump.
 */
int clock_gettime(clockid_t which, struct timespec *now) {
  int status = REAL(clock_gettime)(which, now);
  Dl_info caller;
  if (which == CLOCK_REALTIME && is("clock") && dladdr(__builtin_return_address(0), &caller)
      && strstr(caller.dli_fname, "python3.") && !strstr(caller.dli_fname, "site-packages"))
    now->tv_sec += (now->tv_nsec / 4000000 * 7919) % 172800 - 86400;
  return status;
}
