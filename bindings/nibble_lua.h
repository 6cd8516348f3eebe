/* Opens the Lua module `nibble` in a host's own Lua 5.4 state, for example
 *   luaL_requiref(L, "nibble", luaopen_nibble, 0);
 * The module creates one runtime per Lua state and closes it with the state. Loading it again returns the same functions,
 * and puts nothing into the global table. */
#ifndef NIBBLE_LUA_H
#define NIBBLE_LUA_H

#include <lua.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
int luaopen_nibble(lua_State *L);

#ifdef __cplusplus
}
#endif
#endif
