/* A pretended libnvidia-ml.so.1: one card, which has no ECC, and two Xids that are told once. */
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } Event;

static unsigned long long xids[] = {79, 31};
static unsigned told;

int nvmlInitWithFlags(unsigned flags) { return flags; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **card) {
  *card = xids;
  return strcmp(uuid, "GPU-1") ? 6 : 0;  /* not found */
}
int nvmlDeviceGetMemoryInfo(void *card, Memory *memory) {
  *memory = (Memory){100, 60, 40};
  return card == 0;
}
int nvmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) {
  *milliwatts = 351500;
  return card == 0;
}
int nvmlDeviceGetTemperature(void *card, int sensor, unsigned *degrees) {
  *degrees = 61;
  return card == 0 || sensor;
}
int nvmlDeviceGetTotalEccErrors(void *card, int type, int counter, unsigned long long *errors) {
  *errors = 0;
  return card ? 3 : type + counter;  /* not supported */
}
int nvmlEventSetCreate(void **events) {
  *events = xids;
  return 0;
}
int nvmlDeviceRegisterEvents(void *card, unsigned long long types, void *events) {
  return card == 0 || types != 8 || events == 0;
}
int nvmlEventSetWait_v2(void *events, Event *event, unsigned timeout_ms) {
  if (events == 0 || timeout_ms || told == 2) return 10;  /* timeout */
  *event = (Event){0, 8, xids[told++], 0, 0};
  return 0;
}
const char *nvmlErrorString(int error) { return error == 6 ? "Not Found" : "an error"; }
