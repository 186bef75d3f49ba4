// What the tests under Node share: where the server is, and what the bundled model can answer.

export const BASE_URL = `${process.env.CLIENTS_SERVER}/v1`;
export const MODEL = 'demo';
export const KEY = 'none';
export const SUM = 'How much is 90 + 66?';
export const SUM_ANSWER = '90 + 66 = 156.';
export const FACT = 'Please: What is a baby dog called?';
export const FACT_ANSWER = 'A baby dog is called a puppy.';
export const ADD = 'Use the tool to add 123 and 456.';
export const PERSON =
  'Write a JSON object with the keys name and price. The name is Rosa. The price is 27.';
export const user = (content) => [{ role: 'user', content }];
