/* Loaded before a program's own libraries, this counts its calls that change the disk, and lets one of them fail.

   FAULT_BELOW  folders, separated by colons, as absolute paths; calls elsewhere are not counted
   FAULT_COUNT  a file of 8 bytes with the number of calls so far; a process and its children share it
   FAULT_AT     the number, from 1, of the call where it happens; 0 or nothing lets all calls pass
   FAULT_FULL   a file: while it exists, that call and all later ones are told that the disk is full. Without this name,
                the process is killed at that call instead; if it writes, after the first half of its bytes.

   Deleting needs no room: it is not counted where the disk fills up. A call that ends in the kill is not made. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int below(const char *path) {
  const char *folders = getenv("FAULT_BELOW");
  while (folders && *folders) {
    size_t length = strcspn(folders, ":");
    if (!strncmp(path, folders, length) && (path[length] == '/' || !path[length])) return 1;
    folders += length + (folders[length] == ':');
  }
  return 0;
}

static int is_below(int folder, const char *path) {
  char link[64], whole[2 * PATH_MAX + 2];
  if (!path || !getenv("FAULT_BELOW")) return 0;
  if (*path == '/') return below(path);
  if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
  else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t length = readlink(link, whole, PATH_MAX);
  if (length < 0) return 0;
  snprintf(whole + length, sizeof whole - length, *path ? "/%s" : "%s", path);
  return below(whole);
}

static int is_open_below(int file) { return is_below(file, ""); }

/* Count a call; whether it is the one, or comes after it. */
static int reached(void) {
  const char *name = getenv("FAULT_COUNT"), *at = getenv("FAULT_AT");
  int file = name ? REAL(open)(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file < 0) return 0;
  if (REAL(ftruncate)(file, sizeof(long))) abort();
  long *count = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (count == MAP_FAILED) abort();
  long number = __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST);
  munmap(count, sizeof(long));
  close(file);
  return at && atol(at) && (getenv("FAULT_FULL") ? number >= atol(at) : number == atol(at));
}

static int may_fill(void) { return getenv("FAULT_FULL") != NULL; }

/* Whether the disk is full for this call. */
static int fails(void) {
  int saved = errno, now = reached();
  if (now && !may_fill()) kill(getpid(), SIGKILL);
  now = now && !access(getenv("FAULT_FULL"), F_OK);
  errno = now ? ENOSPC : saved;
  return now;
}

/* The same for a call that would write: what half of it does comes before the kill. */
static int write_fails(int file, const void *bytes, size_t size, off_t at) {
  if (!is_open_below(file)) return 0;
  int saved = errno, now = reached();
  if (now && !may_fill()) {
    if (bytes && at < 0 && REAL(write)(file, bytes, size / 2) < 0) abort();
    if (bytes && at >= 0 && REAL(pwrite)(file, bytes, size / 2, at) < 0) abort();
    kill(getpid(), SIGKILL);
  }
  now = now && !access(getenv("FAULT_FULL"), F_OK);
  errno = now ? ENOSPC : saved;
  return now;
}

/* Opening needs room where it makes a file, or a file without a name. */
static int open_fails(int folder, const char *path, int flags) {
  if (!(flags & O_CREAT) && (flags & O_TMPFILE) != O_TMPFILE && !(flags & O_TRUNC)) return 0;
  if (!is_below(folder, path)) return 0;
  if (may_fill() && (flags & O_TMPFILE) != O_TMPFILE && !faccessat(folder, path, F_OK, 0)) return 0;
  return fails();
}

#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) {
  MODE(flags)
  return open_fails(AT_FDCWD, path, flags) ? -1 : REAL(open)(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE(flags)
  return open_fails(AT_FDCWD, path, flags) ? -1 : REAL(open64)(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
  MODE(flags)
  return open_fails(folder, path, flags) ? -1 : REAL(openat)(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
  MODE(flags)
  return open_fails(folder, path, flags) ? -1 : REAL(openat64)(folder, path, flags, mode);
}

ssize_t write(int file, const void *bytes, size_t size) {
  return write_fails(file, bytes, size, -1) ? -1 : REAL(write)(file, bytes, size);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t at) {
  return write_fails(file, bytes, size, at) ? -1 : REAL(pwrite)(file, bytes, size, at);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t at) {
  return write_fails(file, bytes, size, at) ? -1 : REAL(pwrite64)(file, bytes, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
  return write_fails(file, NULL, 0, -1) ? -1 : REAL(writev)(file, parts, count);
}

ssize_t sendfile(int to, int from, off_t *at, size_t size) {
  return write_fails(to, NULL, 0, -1) ? -1 : REAL(sendfile)(to, from, at, size);
}

ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
  return write_fails(to, NULL, 0, -1) ? -1 : REAL(sendfile64)(to, from, at, size);
}

ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *at, size_t size, unsigned flags) {
  return write_fails(to, NULL, 0, -1) ? -1 : REAL(copy_file_range)(from, start, to, at, size, flags);
}

int fsync(int file) { return is_open_below(file) && fails() ? -1 : REAL(fsync)(file); }

int fdatasync(int file) { return is_open_below(file) && fails() ? -1 : REAL(fdatasync)(file); }

int ftruncate(int file, off_t size) { return is_open_below(file) && fails() ? -1 : REAL(ftruncate)(file, size); }

int ftruncate64(int file, off64_t size) { return is_open_below(file) && fails() ? -1 : REAL(ftruncate64)(file, size); }

int posix_fallocate(int file, off_t at, off_t size) {
  return is_open_below(file) && fails() ? ENOSPC : REAL(posix_fallocate)(file, at, size);
}

int posix_fallocate64(int file, off64_t at, off64_t size) {
  return is_open_below(file) && fails() ? ENOSPC : REAL(posix_fallocate64)(file, at, size);
}

int rename(const char *old, const char *new) {
  return is_below(AT_FDCWD, new) && fails() ? -1 : REAL(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
  return is_below(to, new) && fails() ? -1 : REAL(renameat)(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  return is_below(to, new) && fails() ? -1 : REAL(renameat2)(from, old, to, new, flags);
}

int link(const char *old, const char *new) {
  return is_below(AT_FDCWD, new) && fails() ? -1 : REAL(link)(old, new);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
  return is_below(to, new) && fails() ? -1 : REAL(linkat)(from, old, to, new, flags);
}

int symlink(const char *old, const char *new) {
  return is_below(AT_FDCWD, new) && fails() ? -1 : REAL(symlink)(old, new);
}

int symlinkat(const char *old, int to, const char *new) {
  return is_below(to, new) && fails() ? -1 : REAL(symlinkat)(old, to, new);
}

/* A folder that is there already is an answer of its own, which needs no room. */
static int mkdir_fails(int folder, const char *path) {
  return is_below(folder, path) && !(may_fill() && !faccessat(folder, path, F_OK, 0)) && fails();
}

int mkdir(const char *path, mode_t mode) { return mkdir_fails(AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }

int mkdirat(int folder, const char *path, mode_t mode) {
  return mkdir_fails(folder, path) ? -1 : REAL(mkdirat)(folder, path, mode);
}

int unlink(const char *path) {
  return !may_fill() && is_below(AT_FDCWD, path) && fails() ? -1 : REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
  return !may_fill() && is_below(folder, path) && fails() ? -1 : REAL(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) { return !may_fill() && is_below(AT_FDCWD, path) && fails() ? -1 : REAL(rmdir)(path); }
