// What can be asked of the model beside a chat: a form with texts, and below it what came of them.

import { ApiError, isAbort } from "./api.js";
import { el } from "./elements.js";
import { FieldError } from "./fields.js";

/** Texts of a field that has one a line. */
export function linesOf(text) {
  return text.split("\n").map((line) => line.trim()).filter(Boolean);
}

/** A field's text; raises FieldError if there is none. */
export function given(values, name, what) {
  const text = values[name].trim();
  if (text === "") throw new FieldError(name, `${what} is missing.`);
  return text;
}

/** A field's texts, one a line; raises FieldError unless there are `least` to `most`. */
export function givenLines(values, name, least, most) {
  const texts = linesOf(values[name]);
  if (texts.length < least || texts.length > most)
    throw new FieldError(name, `${least} to ${most} texts, one a line; there are ${texts.length}.`);
  return texts;
}

/** How many tokens, and how long it took, for the line above a result. */
export function costOf(usage, milliseconds) {
  const time = `${milliseconds < 100 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`;
  return usage ? `${usage.prompt_tokens.toLocaleString("en")} tokens, ${time}` : time;
}

/**
 * One view. `task` describes it: `name`, `label` of its tab, `title`, `about`, `verb` of its button,
 * `fields` ({name, label, rows, hint, example}; one row is a line), `ask(values, send)`, which gives
 * {summary, nodes} and may raise FieldError. `send(path, body)` gives {body, milliseconds}.
 *
 * `page` has api, model, kept (texts by view), keep() and failed(error).
 */
export class TaskView {
  #stopper = null;
  #inputs = new Map();
  #problems = new Map();

  constructor(task, page) {
    Object.assign(this, { task, page });
    page.kept[task.name] ??= {};
    this.button = el("button", { type: "submit", className: "primary" }, task.verb);
    this.problem = el("p", { className: "problem", role: "alert" });
    this.summary = el("p", { className: "muted", role: "status" });
    this.result = el("div", { className: "task-result" });
    const example = el("button", { type: "button", className: "quiet", onclick: () => this.#fill() }, "Example");
    const form = el(
      "form",
      { className: "task-form", autocomplete: "off", noValidate: true },
      task.fields.map((field) => this.#field(field)),
      el("div", { className: "task-foot" }, this.button, example),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    const head = [el("h2", {}, task.title), el("p", { className: "muted" }, task.about)];
    this.node = el("div", { className: "task" }, head, form, this.problem, this.summary, this.result);
  }

  get first() {
    return this.#inputs.values().next().value;
  }

  /** Another model, or none: what was shown is not its answer. */
  clear() {
    this.#stopper?.abort();
    this.problem.textContent = this.summary.textContent = "";
    this.result.replaceChildren();
  }

  #field({ name, label, rows, hint }) {
    const id = `${this.task.name}-${name}`;
    const kept = this.page.kept[this.task.name];
    const props = { id, name, placeholder: hint ?? "", value: kept[name] ?? "", "aria-describedby": `${id}-problem` };
    const input = rows === 1 ? el("input", { ...props, type: "text" }) : el("textarea", { ...props, rows });
    const problem = el("p", { className: "problem", id: `${id}-problem`, role: "alert" });
    input.addEventListener("input", () => {
      kept[name] = input.value;
      this.#say(name, "");
      this.page.keep();
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.isComposing || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      input.form.requestSubmit();
    });
    this.#inputs.set(name, input);
    this.#problems.set(name, problem);
    return el("div", { className: "field" }, el("label", { className: "label", for: id }, label), input, problem);
  }

  #fill() {
    for (const { name, example } of this.task.fields) {
      this.#inputs.get(name).value = example;
      this.#inputs.get(name).dispatchEvent(new Event("input"));
    }
  }

  #say(name, problem) {
    this.#problems.get(name).textContent = problem;
    this.#inputs.get(name).setAttribute("aria-invalid", String(problem !== ""));
  }

  async #run() {
    this.clear();
    for (const name of this.#inputs.keys()) this.#say(name, "");
    const stopper = new AbortController();
    this.#stopper = stopper;
    this.node.setAttribute("aria-busy", "true");
    this.button.disabled = true;
    const values = Object.fromEntries([...this.#inputs].map(([name, input]) => [name, input.value]));
    const send = async (path, body) => {
      const begin = performance.now();
      const answer = await this.page.api.post(path, { model: this.page.model, ...body }, stopper.signal);
      return { body: answer, milliseconds: performance.now() - begin };
    };
    try {
      const { summary, nodes } = await this.task.ask(values, send);
      this.summary.textContent = summary;
      this.result.replaceChildren(...nodes);
    } catch (error) {
      this.#fail(error);
    } finally {
      if (this.#stopper === stopper) {
        this.#stopper = null;
        this.node.setAttribute("aria-busy", "false");
        this.button.disabled = false;
      }
    }
  }

  #fail(error) {
    if (error instanceof FieldError) {
      this.#say(error.field, error.message);
      this.#inputs.get(error.field).focus();
    } else if (error instanceof ApiError) {
      this.problem.textContent = error.message;
      this.page.failed(error);
    } else if (!isAbort(error)) throw error;
  }
}

/** The tabs of the views; hidden where there is one. `onchange` gets the name of the one that is shown. */
export class Tabs {
  #tabs = new Map();

  constructor(list, onchange) {
    Object.assign(this, { list, onchange, chosen: null });
    list.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const names = [...this.#tabs.keys()];
      const next = names[(names.indexOf(this.chosen) + step + names.length) % names.length];
      this.choose(next);
      this.#tabs.get(next).focus();
    });
  }

  /** Show tabs for these views, [name, label, id of its panel]; keeps the chosen one if it is among them. */
  set(views) {
    this.#tabs = new Map(
      views.map(([name, label, panel]) => {
        const props = { type: "button", id: `tab-${name}`, role: "tab", "aria-controls": panel };
        return [name, el("button", { ...props, onclick: () => this.choose(name) }, label)];
      }),
    );
    this.list.replaceChildren(...this.#tabs.values());
    this.list.hidden = views.length < 2;
    const kept = this.#tabs.has(this.chosen) ? this.chosen : views[0][0];
    this.choose(kept);
  }

  choose(name) {
    this.chosen = name;
    for (const [each, tab] of this.#tabs) {
      tab.setAttribute("aria-selected", String(each === name));
      tab.tabIndex = each === name ? 0 : -1;
    }
    this.onchange(name);
  }
}
