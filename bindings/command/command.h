/* The `nibble` command: main.c runs scripts and subcommands, repl.c is the prompt, complete.c completes its names,
 * show.c prints its values, and call.c makes calls that Ctrl-C can end. */
#ifndef NIB_COMMAND_H
#define NIB_COMMAND_H

#include <lua.h>

/* ---- call.c ---- */
/* lua_pcall that adds a traceback to the error message. Ctrl-C ends the call with the error "interrupted!". */
int nib_command_call(lua_State *L, int arguments, int results);
/* Writes the error message on top of the stack to stderr, red on a terminal, and pops it. */
void nib_command_report(lua_State *L, const char *prefix);
/* Replaces Lua's coroutine functions, so that Ctrl-C also ends coroutines. */
void nib_command_open_coroutines(lua_State *L);

/* ---- show.c ---- */
/* Lua: (...). Prints its arguments on one line. */
int nib_command_show(lua_State *L);

/* ---- complete.c ---- */
/* Lua: (line) -> names, typed. Completes the last name of `line`: returns a sorted array of names that begin with it,
 * and its length. Calls no function and no metamethod, but looks into an __index that is a table and into the table
 * `methods` of a metatable. */
int nib_command_complete(lua_State *L);

/* ---- repl.c ---- */
/* Reads lines from the terminal and runs them until the end of input. Returns the exit status. */
int nib_command_repl(lua_State *L);

#endif
