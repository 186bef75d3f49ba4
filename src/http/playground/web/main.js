// Puts the page together.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Conversation } from "./conversation.js";
import { byId, el } from "./elements.js";
import { FieldError, Fields } from "./fields.js";
import { clearNotice, notify, showStatus } from "./notice.js";
import { Panel } from "./panel.js";
import { CLASSIFY, RERANK } from "./ranks.js";
import { KeyDialog, setUpTheme, Sheet } from "./sheets.js";
import { loadKeys, loadSettings, loadTasks, loadTurns } from "./store.js";
import { saveKeys, saveSettings, saveTasks, saveTurns } from "./store.js";
import { Tabs, TaskView } from "./tasks.js";
import { LEGEND } from "./tokens.js";
import { COMPARE, EMBED } from "./vectors.js";
import { Watch } from "./watch.js";

const question = byId("question");
const models = byId("model");
const colours = byId("colours");

const api = new Api(loadKeys());
const watch = new Watch(api);
const fields = new Fields(byId("fields"), loadSettings(), saveSettings);
const options = {
  request: () => fields.request(),
  get system() {
    return fields.system;
  },
  get model() {
    return models.value || undefined;
  },
  get probabilities() {
    return colours.checked;
  },
};
const chat = new Chat(api, watch, options, loadTurns());
const keyDialog = new KeyDialog(useKeys);
const openKeys = () => keyDialog.open(api.keys);
const panel = new Panel(byId("panel"), watch, openKeys);
const settings = new Sheet("settings", false);
const engine = new Sheet("engine", true, (open) => {
  watch.lively = open || chat.busy;
  watch.wake();
});
const conversation = new Conversation(byId("turns"), chat, {
  coloured: () => colours.checked,
  ask: (text) => attempt(() => chat.ask(text)),
  edit: (turn, text) => text && attempt(() => chat.edit(turn, text)),
  regenerate: (turn) => attempt(() => chat.regenerate(turn)),
  results: (turn, contents) => attempt(() => chat.results(turn, contents)),
});

// Which views a task has beside the chat, which text has.
const VIEWS = { embed: [EMBED, COMPARE], score: [RERANK], classify: [CLASSIFY] };
const page = {
  api,
  kept: loadTasks(),
  keep: () => saveTasks(page.kept),
  failed: (error) => failed(error),
  get model() {
    return options.model;
  },
};
const taskViews = new Map(
  Object.values(VIEWS).flat().map((task) => [task.name, new TaskView(task, page)]),
);
const tabs = new Tabs(byId("views"), showView);
// Name of a served model or an adapter -> its tasks.
const tasksOf = new Map();

function showView(name) {
  const chats = name === "chat";
  byId("chat").hidden = !chats;
  byId("tasks").hidden = chats;
  for (const id of ["new", "settings-button"]) byId(id).hidden = !chats;
  if (!chats) settings.set(false);
  byId("skip").href = "#question";
  if (chats) return;
  const view = taskViews.get(name);
  byId("tasks").setAttribute("aria-label", view?.task.label ?? "Tasks");
  byId("tasks").replaceChildren(view ? view.node : nothingToShow());
  if (view) byId("skip").href = `#${view.first.id}`;
}

/** The page has no form for what the model does. */
function nothingToShow() {
  const tasks = tasksOf.get(models.value) ?? [];
  const text = `This page has no form for what this model does: ${tasks.join(", ")}.`;
  // A link carries no key.
  const link = api.keys.api ? [] : [el("p", {}, el("a", { href: "docs" }, "How to ask for it"))];
  return el("div", { className: "welcome" }, el("p", {}, text), link);
}

/** Show the views of the chosen model. */
function showTasks() {
  const tasks = tasksOf.get(models.value);
  if (tasks === undefined) return;
  const views = Object.entries(VIEWS).flatMap(([task, made]) => (tasks.includes(task) ? made : []));
  const chat = tasks.includes("generate") ? [["chat", "Chat", "chat"]] : [];
  const shown = [...chat, ...views.map(({ name, label }) => [name, label, "tasks"])];
  for (const view of taskViews.values()) view.clear();
  tabs.set(shown.length ? shown : [["none", "Tasks", "tasks"]]);
}

/** Run what asks for an answer, one at a time; whether it began. */
function attempt(act) {
  if (chat.busy) return false;
  const done = act();
  const began = chat.busy;
  done
    .catch((error) => {
      if (!(error instanceof FieldError)) throw error;
      settings.set(true);
      fields.show(error);
    })
    .finally(() => (watch.lively = chat.busy || !engine.node.hidden));
  if (began) {
    clearNotice();
    watch.lively = true;
    watch.wake();
  }
  return began;
}

function showBusy() {
  document.body.classList.toggle("answering", chat.busy);
  byId("send").hidden = chat.busy;
  byId("stop").hidden = !chat.busy;
}

chat.onchange = (turn) => {
  conversation.changed(turn);
  showBusy();
  if (!turn?.busy) saveTurns(chat.turns);
};
chat.onfailure = failed;
function failed(error) {
  if (error.status === 401) keyDialog.open(api.keys, error.message);
  if (error.unreachable || error.code === "cut") watch.wake();
}

watch.onlook = () => {
  const { health, reached } = watch;
  if (!reached) showStatus("bad", "no answer");
  else if (health.phase !== "ready") showStatus("wait", phaseText(health));
  else showStatus(health.stalled ? "bad" : "good", health.stalled ? "stalled" : "ready");
  if (reached && models.options.length === 0) loadModels();
  byId("panel").classList.toggle("stale", !reached);
  panel.draw();
};
watch.onlost = () =>
  notify("The server does not answer. Your conversation is kept; the page tries again every second.", { kind: "bad" });
watch.onback = () => {
  notify("The server is back.", { kind: "good", seconds: 6 });
  panel.reset();
  models.replaceChildren();
};

function phaseText({ phase, progress }) {
  return progress > 0 && progress < 1 ? `${phase}, ${Math.round(progress * 100)} %` : phase;
}

let loadingModels = false;

/** The models there are; asks for a key where one is needed. */
async function loadModels() {
  if (loadingModels || keyDialog.node.open) return;
  loadingModels = true;
  try {
    const { data } = await api.json("v1/models");
    const wanted = models.dataset.chosen;
    models.replaceChildren(...data.map(({ id }) => el("option", { value: id, selected: id === wanted }, id)));
    const [first] = data;
    tasksOf.clear();
    for (const { id, tasks } of data) tasksOf.set(id, tasks);
    showTasks();
    models.title = `${figureOf(first.max_model_len)} tokens of context, ${first.implementation}`;
  } catch (error) {
    const given = api.keys.api !== "";
    if (error.status !== 401) return;
    byId("api-link").hidden = true;
    keyDialog.open(api.keys, given ? error.message : "");
  } finally {
    loadingModels = false;
  }
}

const figureOf = (number) => number.toLocaleString("en");

/** A link carries no key, so where one is needed the description cannot be opened by it. */
const showLink = () => (byId("api-link").hidden = api.keys.api !== "");

function useKeys(keys) {
  api.keys = keys;
  showLink();
  saveKeys(keys);
  watch.forget();
  panel.reset();
  models.replaceChildren();
  watch.wake();
}

function resize() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, innerHeight * 0.4)}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (text === "" || !attempt(() => chat.ask(text))) return;
  question.value = "";
  resize();
});
question.addEventListener("input", resize);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.busy && !keyDialog.node.open) chat.stop();
});
byId("stop").addEventListener("click", () => {
  chat.stop();
  question.focus();
});
byId("new").addEventListener("click", () => {
  const turns = chat.clear();
  question.focus();
  if (turns.length) notify("A new conversation.", { action: ["Undo", () => chat.restore(turns)], seconds: 10 });
});
colours.addEventListener("change", () => {
  byId("legend").hidden = !colours.checked;
  conversation.render();
});
models.addEventListener("change", () => {
  models.dataset.chosen = models.value;
  showTasks();
});
byId("keys-button").addEventListener("click", openKeys);
byId("legend").append(
  ...LEGEND.map((text, i) => el("span", { className: `token p${4 - i}` }, text)),
  el("span", { className: "token together first" }, "of one step"),
);
showLink();
setUpTheme(byId("theme"));
watch.wake();
question.focus();
