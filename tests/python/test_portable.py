"""packaging/old_glibc.cpp, as it works with a glibc that lacks its functions."""

import os
import shutil
import subprocess

import pytest

from conftest import ROOT

SOURCE = ROOT / "packaging" / "old_glibc.cpp"
PROGRAM = r"""
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
extern "C" const char* old_sigdescr_np(int);
extern "C" uint32_t old_arc4random();
extern "C" int old_clockwait(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
extern "C" int old_clocklock(pthread_mutex_t*, clockid_t, const timespec*);
int main() {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  pthread_mutex_lock(&mutex);
  // Deadlines on both sides of a whole second, past ones and later ones.
  for (int milliseconds = -1500; milliseconds <= 700; milliseconds += 100) {
    timespec before{}, after{};
    clock_gettime(CLOCK_MONOTONIC, &before);
    const int64_t start = before.tv_sec * 1000000000LL + before.tv_nsec, end = start + milliseconds * 1000000LL;
    const timespec deadline{.tv_sec = end / 1000000000, .tv_nsec = end % 1000000000};
    const bool waits = milliseconds % 200 == 0;
    const int result = waits ? old_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &deadline)
                             : old_clocklock(&mutex, CLOCK_MONOTONIC, &deadline);
    clock_gettime(CLOCK_MONOTONIC, &after);
    printf("%d %d %.1f\n", milliseconds, result, (after.tv_sec * 1000000000LL + after.tv_nsec - start) / 1e6);
  }
  pthread_mutex_unlock(&mutex);
  const timespec past{};
  if (old_clocklock(&mutex, CLOCK_MONOTONIC, &past) != 0) printf("a free mutex was not taken\n");
  for (int signal = -1; signal < 70; ++signal) {
    const char *old = old_sigdescr_np(signal), *ours = signal <= SIGSYS ? sigdescr_np(signal) : nullptr;
    if ((old == nullptr) != (ours == nullptr) || (old && strcmp(old, ours) != 0)) printf("signal %d: %s\n", signal, old);
  }
  if (old_arc4random() == old_arc4random()) printf("one number twice\n");
}
"""

REPLACED = {
    "int pthread_cond_clockwait(pthread_cond_t*": "int old_clockwait(pthread_cond_t*",
    "const char* sigdescr_np(": "const char* old_sigdescr_np(",
    "uint32_t arc4random(": "uint32_t old_arc4random(",
    "char __libc_single_threaded = 0;": "",
    "int pthread_mutex_clocklock(pthread_mutex_t*": "int old_clocklock(pthread_mutex_t*",
    'dlsym(RTLD_DEFAULT, "pthread_cond_clockwait")': "static_cast<void*>(nullptr)",
    'dlsym(RTLD_DEFAULT, "pthread_mutex_clocklock")': "static_cast<void*>(nullptr)",
}


@pytest.mark.skipif(not SOURCE.exists() or not shutil.which("g++"), reason="no sources or no g++")
def test_waits_signals_and_random_numbers_of_an_old_glibc(tmp_path):
    (tmp_path / "program.cpp").write_text(PROGRAM)
    # Its functions under other names, beside glibc's, and no newer function to be found.
    text = SOURCE.read_text()
    for old, new in REPLACED.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "old.cpp").write_text(text)
    subprocess.run(["g++", "-std=c++20", "-O1", "-c", "old.cpp"], cwd=tmp_path, check=True)
    subprocess.run(["g++", "-std=c++20", "-pthread", "program.cpp", "old.o", "-o", "program"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60, check=True, env=os.environ | {"LC_ALL": "C"})
    waits = [line.split() for line in done.stdout.splitlines()]
    assert len(waits) == 23 and all(len(wait) == 3 for wait in waits), done.stdout
    for milliseconds, result, took in waits:
        assert int(result) == 110  # ETIMEDOUT
        assert max(int(milliseconds), 0) - 1 <= float(took) < max(int(milliseconds), 0) + 2000, waits
