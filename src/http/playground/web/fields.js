// The settings of a request: a form, and the fields of the API that it stands for.

import { el } from "./elements.js";
import { PARAMETERS } from "./parameters.js";

const NUMBERS = [
  ...PARAMETERS,
  { name: "max_tokens", label: "Max tokens", least: 1, most: 1e7, step: 1, hint: "as many as fit" },
  { name: "seed", label: "Seed", least: -9e15, most: 9e15, step: 1, hint: "random" },
];

const TOOLS_EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather in a city.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

const TEXTS = [
  { name: "system", label: "System prompt", rows: 3, hint: "none" },
  { name: "stop", label: "Stop strings, one a line", rows: 2, hint: "none; \\n is a line break" },
  { name: "schema", label: "JSON schema for the answer", rows: 4, hint: "none", example: SCHEMA_EXAMPLE },
  { name: "tools", label: "Tools, as JSON", rows: 4, hint: "none", example: TOOLS_EXAMPLE },
];

/** What is wrong with a field, for the reader. */
export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

/** The form; `values` are what was typed, by name. */
export class Fields {
  #inputs = new Map();
  #problems = new Map();

  constructor(form, values, onchange) {
    this.values = values;
    const save = (name, input) => {
      this.values[name] = input.value;
      this.#say(name, "");
      onchange(this.values);
    };
    const texts = Object.fromEntries(TEXTS.map((field) => [field.name, this.#text(field, save)]));
    const numbers = NUMBERS.map((field) => this.#number(field, save));
    const clear = el("button", { type: "button", className: "quiet", onclick: () => this.clear() }, "Back to defaults");
    form.append(texts.system, el("div", { className: "numbers" }, numbers));
    form.append(texts.stop, texts.schema, texts.tools, clear);
  }

  clear() {
    for (const [name, input] of this.#inputs) {
      input.value = "";
      input.dispatchEvent(new Event("input"));
      this.#say(name, "");
    }
  }

  /** Show a field's error beside it. */
  show(error) {
    this.#say(error.field, error.message);
    this.#inputs.get(error.field).focus();
  }

  /** The fields of a request; raises FieldError. */
  request() {
    const request = {};
    for (const field of NUMBERS) {
      const value = numberOf(field, this.#inputs.get(field.name));
      if (value !== null) request[field.name] = value;
    }
    const stop = this.#typed("stop").split("\n").filter(Boolean);
    if (stop.length) request.stop = stop.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    const schema = this.#json("schema");
    if (schema !== null) {
      const format = { name: "answer", schema };
      request.response_format = { type: "json_schema", json_schema: format };
    }
    const tools = this.#json("tools");
    if (tools !== null) request.tools = toolsOf(tools);
    return request;
  }

  /** The system prompt; empty for none. */
  get system() {
    return this.#typed("system").trim();
  }

  #typed(name) {
    return this.#inputs.get(name).value;
  }

  #json(name) {
    const text = this.#typed(name).trim();
    if (text === "") return null;
    try {
      return JSON.parse(text);
    } catch (error) {
      throw new FieldError(name, `This is no JSON: ${error.message}`);
    }
  }

  #say(name, problem) {
    const place = this.#problems.get(name);
    place.textContent = problem;
    this.#inputs.get(name).setAttribute("aria-invalid", String(problem !== ""));
  }

  #number({ name, label, least, most, step, hint }, save) {
    const props = { type: "number", min: least, max: most, step: "any", placeholder: hint };
    props["data-step"] = step;
    return this.#field(name, label, el("input", { ...props, inputMode: "decimal" }), save);
  }

  #text({ name, label, rows, hint, example }, save) {
    const area = el("textarea", { rows, placeholder: hint, spellcheck: name === "system" });
    const field = this.#field(name, label, area, save);
    if (!example) return field;
    const insert = () => {
      area.value = JSON.stringify(example, null, 2);
      area.dispatchEvent(new Event("input"));
    };
    const button = el("button", { type: "button", className: "quiet", onclick: insert }, "Example");
    field.querySelector(".label").append(button);
    return field;
  }

  #field(name, label, input, save) {
    const id = `field-${name}`;
    const problem = el("p", { className: "problem", id: `${id}-problem`, role: "alert" });
    Object.assign(input, { id, name, value: this.values[name] ?? "" });
    input.setAttribute("aria-describedby", problem.id);
    input.addEventListener("input", () => save(name, input));
    this.#inputs.set(name, input);
    this.#problems.set(name, problem);
    const head = el("div", { className: "label" }, el("label", { for: id }, label));
    return el("div", { className: "field" }, head, input, problem);
  }
}

function numberOf({ name, least, most, step }, input) {
  if (input.validity.badInput) throw new FieldError(name, "This is no number.");
  if (input.value === "") return null;
  const value = Number(input.value);
  const whole = step !== 1 || Number.isInteger(value);
  if (value < least || value > most || !whole)
    throw new FieldError(name, `${whole ? "A number" : "A whole number"} from ${least} to ${most}.`);
  return value;
}

/** Tools as the API has them; a bare function is taken as one too. */
function toolsOf(value) {
  const list = Array.isArray(value) ? value : [value];
  if (list.some((tool) => typeof (tool?.function ?? tool)?.name !== "string"))
    throw new FieldError("tools", "A list of tools, each with a name and parameters.");
  return list.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
}
