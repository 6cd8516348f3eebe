/* The `nibble` command: main.c (arguments and scripts), repl.c (the prompt), complete.c (Tab). */
#ifndef NIB_COMMAND_H
#define NIB_COMMAND_H

#include <lua.h>

/* lua_pcall with a traceback in the error message, which Ctrl-C ends with the error "interrupted!". */
int nib_command_call(lua_State *L, int arguments, int results);

/* Writes the error message on top of the stack to stderr, red on a terminal, and pops it. */
void nib_command_report(lua_State *L, const char *prefix);

/* Reads lines from the terminal and runs them until the end of input. Returns the exit status. */
int nib_command_repl(lua_State *L);

/* Lua: (line) -> names, typed. What the last name of `line` can become: a sorted array of names, and how many
 * characters of each are typed already. Calls no functions and no metamethods, but follows __index where that is a
 * table, and the table `methods` of a metatable. */
int nib_command_complete(lua_State *L);

#endif
