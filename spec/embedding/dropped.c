/* Checked mode in a host's Lua state knows that work was dropped: what that was to write counts as never written. */
#include <lauxlib.h>
#include <lualib.h>

#include "../../bindings/nibble_lua.h"
#include "gate.h"

static int cuts;

static void observe(void *user, const nib_observation *o) {
  CHECK(o->kind != NIB_OBSERVED_STORAGE_CUT || o->storage == *(const uint64_t *)user);
  cuts += o->kind == NIB_OBSERVED_STORAGE_CUT;
}

static void run(lua_State *L, const char *code) {
  if (luaL_dostring(L, code) == LUA_OK) return;
  fprintf(stderr, "%s: %s\n", code, lua_tostring(L, -1));
  exit(1);
}

int main(void) {
  nib_config config = { .index_base = 1 };
  nib_runtime *runtime = NULL;
  OK(NULL, nib_runtime_create(&config, &runtime));
  nib_stream *stream = nib_device_default_stream(cpu_of(runtime));

  /* An observer in C. */
  nib_tensor *x = make(cpu_of(runtime), NIB_FLOAT32, 4);
  uint64_t storage = nib_tensor_storage(x);
  nib_runtime_observe(runtime, observe, &storage);
  struct gate first = CLOSED_GATE, second = CLOSED_GATE;
  OK(runtime, nib_stream_call(stream, hold, &first));
  nib_mark_work(runtime);
  OK(runtime, nib_tensor_fill(stream, x, NIB_REAL(1)));
  OK(runtime, nib_drop_work(runtime, NULL));
  CHECK(cuts == 1);
  open_gate(&first);
  OK(runtime, nib_device_synchronize(cpu_of(runtime), NIB_UNLIMITED));
  OK(runtime, nib_drop_work(runtime, NULL)); /* nothing is left */
  CHECK(cuts == 1);
  nib_runtime_observe(runtime, NULL, NULL);
  nib_tensor_release(x);

  /* Checked mode. */
  lua_State *L = luaL_newstate();
  CHECK(L);
  luaL_openlibs(L);
  OK(runtime, nib_lua_open(L, runtime));
  lua_setglobal(L, "nibble");
  run(L, "nibble.check(function() end) t = nibble.zeros(4, {device = 'cpu'}) nibble.synchronize('cpu')");
  OK(runtime, nib_stream_call(stream, hold, &second));
  nib_mark_work(runtime);
  run(L, "t:fill(1)");
  OK(runtime, nib_drop_work(runtime, NULL));
  open_gate(&second);
  run(L, "t:totable() local r = nibble.check_reports() assert(#r == 1 and r[1].kind == 'unwritten', #r)");
  run(L, "t:fill(2) t:totable() assert(#nibble.check_reports() == 1)");
  lua_close(L);
  nib_runtime_close(runtime);
  return 0;
}
