// What the browser keeps: the conversation and the settings in localStorage, keys for this tab only.

const TURNS = "slipstream.turns";
const SETTINGS = "slipstream.settings";
const TASKS = "slipstream.tasks";
const THEME = "slipstream.theme";
const KEYS = "slipstream.keys";

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
  } catch {
    // Storage that is full or forbidden: the page goes on without it.
  }
}

/** Turns without their tokens, which take a hundred times the room of the text. */
export function saveTurns(turns) {
  const kept = turns.map(({ tokens, busy, ...turn }) => turn);
  write(localStorage, TURNS, kept);
}

export function loadTurns() {
  const turns = read(localStorage, TURNS, []);
  return Array.isArray(turns) ? turns.filter((turn) => typeof turn?.role === "string") : [];
}

export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);
export const loadSettings = () => read(localStorage, SETTINGS, {});
export const saveTasks = (texts) => write(localStorage, TASKS, texts);
export const loadTasks = () => read(localStorage, TASKS, {});
export const saveTheme = (theme) => write(localStorage, THEME, theme);
export const loadTheme = () => read(localStorage, THEME, "auto");
export const saveKeys = (keys) => write(sessionStorage, KEYS, keys);
export const loadKeys = () => ({ api: "", admin: "", ...read(sessionStorage, KEYS, {}) });
